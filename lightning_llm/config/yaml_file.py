"""YAML files: reading a user's as a mapping, or every fault with its line, and writing a run's `config.yaml`."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lightning_llm.base.errors import ConfigError, Problem

if TYPE_CHECKING:
    from omegaconf import DictConfig  # imported late: verbs that only list files do without

    from lightning_llm.config.schema import Config

MOST_VALUES = 1_000_000
"""Values of a file with its aliases expanded: ten levels of ten aliases would fill the memory."""
KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
LARGEST_BYTES = 16 << 20
"""No config comes near; what does is another file."""
DEEPEST = 100
"""Levels of nesting. libyaml's composer ends the process, by a full stack, where Python's raises an error."""
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's where PyYAML was built with it: four times as fast, the same text but where it folds a long quoted one."""

INTERPOLATION = re.compile(r"(\\*)\$\{")
"""The start of an interpolation of OmegaConf, and the backslashes before it."""


def read_mapping(file: Path, key: str, wanted: str = "Write lines of `key: value`.") -> DictConfig:
    """Return the mapping that `file` holds.

    Args:
        file: UTF-8 text, with or without a byte order mark.
        key: what the problems are reported for: a flag, or `group=name`.
        wanted: a sentence on what to give, behind each problem.

    Raises:
        ConfigError: the file is missing, is no file, cannot be read, is no text, is no YAML, gives a key twice, or
            holds anything but a mapping.
    """
    from omegaconf import DictConfig, OmegaConf

    text = _text(file, key, wanted)
    try:
        node, loader = _composed(text)
        problems = [Problem(key, f"{file}, {each}. {wanted}") for each in _faults(node)]
        if problems:
            raise ConfigError(problems)
        tree = OmegaConf.create(loader("").construct_document(node))
    except yaml.YAMLError as error:
        raise ConfigError(Problem(key, f"{file}{_yaml_fault(error, text)}. {wanted}")) from error
    except RecursionError as error:
        raise ConfigError(Problem(key, f"{file} is nested too deeply. {wanted}")) from error
    if not isinstance(tree, DictConfig):
        raise TypeError(f"{file}: a mapping node became {type(tree).__name__}")
    return tree


def _composed(text: str) -> tuple[yaml.Node | None, Any]:
    """Return the document's node, and the loader that reads it: by libyaml, ten times as fast, where that takes it.

    What it refuses Python's own parser reads, or says in its words what is wrong. Raises YAMLError, RecursionError.
    """
    slow, fast = _loaders()
    if fast is not None:
        with suppress(yaml.YAMLError):
            if _is_flat_enough(text, fast):
                return yaml.compose(text, fast), fast
    return yaml.compose(text, slow), slow


@cache
def _loaders() -> tuple[Any, Any | None]:
    """Return OmegaConf's loader, to which `1e-3` is a number and a date a text, and one like it on libyaml's parser."""
    from omegaconf._utils import get_yaml_loader

    slow = get_yaml_loader()
    if not yaml.__with_libyaml__:
        return slow, None
    tables = {name: getattr(slow, name) for name in ("yaml_implicit_resolvers", "yaml_constructors")}
    return slow, type("LibyamlLoader", (yaml.CSafeLoader,), tables)


def _is_flat_enough(text: str, loader: Any) -> bool:
    depth = 0
    for event in yaml.parse(text, loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            return False
    return True


def file_fault(file: Path) -> str | None:
    """Return why `file` is none that can be read ("is a folder"), None where it is a regular file."""
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        return "does not exist"
    except (OSError, ValueError) as error:  # a loop of links, a name too long, no right to look; a null byte
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISDIR(mode):
        return "is a folder, not a file"
    return None if stat.S_ISREG(mode) else "is no regular file"


def _text(file: Path, key: str, wanted: str) -> str:
    fault = file_fault(file)
    if fault is None and file.stat().st_size > LARGEST_BYTES:
        fault = f"has {file.stat().st_size:,} bytes, which is no config"
    if fault:
        raise ConfigError(Problem(key, f"{file} {fault}. {wanted}"))
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ConfigError(Problem(key, f"{file} cannot be read: {error.strerror}. {wanted}")) from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        text = f"{file}, line {line}: byte 0x{content[error.start]:02x} is no UTF-8 text. {wanted}"
        raise ConfigError(Problem(key, text)) from error


def _yaml_fault(error: yaml.YAMLError, text: str) -> str:
    """Return ", line 3: what is wrong" in one line."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f", line {line}: character {chr(int(error.character))!r} is not allowed in YAML"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    reason = ": ".join(each for each in (getattr(error, "context", None), getattr(error, "problem", None)) if each)
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{where}: {reason or error}{' (indent with spaces, not tabs)' if repr(chr(9)) in reason else ''}"


def _faults(node: yaml.Node | None) -> Iterator[str]:
    if node is None:
        yield "line 1: it holds nothing"
    elif not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
        yield f"line {node.start_mark.line + 1}: it holds {kind}, not a mapping"
    else:
        faults = list(_faults_within(node, set(), set()))
        yield from faults
        if not faults and _expanded(node, {}) > MOST_VALUES:
            yield f"line {node.start_mark.line + 1}: its aliases expand to more than {MOST_VALUES:,} values"


def _expanded(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values below `node`, one that several aliases name counted for each; `known` by id."""
    if id(node) not in known:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        children = node.value if isinstance(node, yaml.SequenceNode) else [value for _, value in pairs]
        known[id(node)] = 1 + sum(_expanded(child, known) for child in children)
    return known[id(node)]


def _faults_within(node: yaml.Node, above: set[int], seen: set[int]) -> Iterator[str]:
    """Yield each key that a mapping gives twice (YAML would take the last), and each anchor that holds itself."""
    if id(node) in above:
        yield f"line {node.start_mark.line + 1}: an anchor that holds itself"
    if id(node) in seen:
        return  # an alias of what was looked at
    seen.add(id(node))
    children = list(node.value) if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for name, value in node.value:
            line = name.start_mark.line + 1
            if not isinstance(name, yaml.ScalarNode) or name.tag not in KEY_TAGS:
                yield f"line {line}: the key is no text. Keys are names; quote '{name.value}' if it is one"
            elif first.setdefault(name.value, line) != line:
                yield f"line {line}: the key '{name.value}' stands on line {first[name.value]} already"
            children.append(value)
    for child in children:
        yield from _faults_within(child, above | {id(node)}, seen)


def config_text(config: Config) -> str:
    """Return `config` as YAML that `train --config FILE` takes."""
    return str(yaml.dump(literal(config.model_dump()), Dumper=_DUMPER, sort_keys=False, allow_unicode=True))


def literal(value: Any) -> Any:
    """Return `value` with "${" in its texts escaped, so that a tree of OmegaConf resolves them to these texts."""
    if isinstance(value, str):
        return INTERPOLATION.sub(lambda found: f"{found[1] * 2}\\${{", value)
    if isinstance(value, dict):
        return {key: literal(each) for key, each in value.items()}
    return [literal(each) for each in value] if isinstance(value, list | tuple) else value


def without_escapes(value: Any) -> Any:
    """Return `value`, read from a config.yaml as plain YAML, with its texts as they were in the config."""
    if isinstance(value, str):
        return INTERPOLATION.sub(lambda found: f"{found[1][: len(found[1]) // 2]}${{", value)
    if isinstance(value, dict):
        return {key: without_escapes(each) for key, each in value.items()}
    return [without_escapes(each) for each in value] if isinstance(value, list) else value


def write_config(config: Config, file: Path) -> None:
    """Write `config` so that `train --config FILE` repeats the run; the file appears whole."""
    partial = file.with_suffix(".partial")
    partial.write_text(config_text(config), encoding="utf-8")
    partial.rename(file)


@contextmanager
def in_memory(config: Config) -> Iterator[Path]:
    """Yield a file with `config` for this process's children to read; it is gone with this process, however that ends.

    It lies in memory (memfd_create(2)) and has no name but the one under /proc.
    """
    with os.fdopen(os.memfd_create("config.yaml"), "wb") as file:
        file.write(config_text(config).encode())
        file.flush()
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
