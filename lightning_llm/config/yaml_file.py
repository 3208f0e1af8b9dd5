"""Reading a user's YAML file as a mapping, with line numbers of all errors, and writing a run's `config.yaml`."""

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
"""Maximum number of values with aliases expanded: ten levels of ten aliases would exhaust memory."""
KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
LARGEST_BYTES = 16 << 20
"""Larger files are not configs."""
DEEPEST = 100
"""Maximum nesting. Deeper files overflow the stack of libyaml's composer, which ends the process."""
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's dumper if PyYAML has it: four times as fast, with the same text except for folds of long quoted text."""

INTERPOLATION = re.compile(r"(\\*)\$\{")
"""Start of an OmegaConf interpolation, with preceding backslashes."""


def read_mapping(file: Path, key: str, wanted: str = "Write lines of `key: value`.") -> DictConfig:
    """Return the mapping in a YAML file.

    Args:
        file: UTF-8 text, with or without a byte order mark.
        key: key of the reported problems: a flag, or `group=name`.
        wanted: a sentence with the remedy, added to each problem.

    Raises:
        ConfigError: the file is missing, unreadable, not text, not YAML, not a mapping, or has duplicate keys.
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
    """Return the document's node and its loader: libyaml's, which is ten times as fast, if it accepts the text.

    Otherwise PyYAML's Python parser reads the text or raises the error. Raises YAMLError, RecursionError.
    """
    slow, fast = _loaders()
    if fast is not None:
        with suppress(yaml.YAMLError):
            if _is_flat_enough(text, fast):
                return yaml.compose(text, fast), fast
    return yaml.compose(text, slow), slow


@cache
def _loaders() -> tuple[Any, Any | None]:
    """Return OmegaConf's loader, which reads `1e-3` as a number and dates as text, and the same on libyaml's parser."""
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
    """Return why `file` cannot be read ("is a folder, not a file"); None if it is a regular file."""
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        return "does not exist"
    except (OSError, ValueError) as error:  # a loop of links, a name too long, no permission; a null byte
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISDIR(mode):
        return "is a folder, not a file"
    return None if stat.S_ISREG(mode) else "is not a regular file"


def _text(file: Path, key: str, wanted: str) -> str:
    fault = file_fault(file)
    if fault is None and file.stat().st_size > LARGEST_BYTES:
        fault = f"has {file.stat().st_size:,} bytes, too many for a config"
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
        text = f"{file}, line {line}: byte 0x{content[error.start]:02x} is not UTF-8 text. {wanted}"
        raise ConfigError(Problem(key, text)) from error


def _yaml_fault(error: yaml.YAMLError, text: str) -> str:
    """Return the error as one line: ", line 3: REASON"."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f", line {line}: character {chr(int(error.character))!r} is not allowed in YAML"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    reason = ": ".join(each for each in (getattr(error, "context", None), getattr(error, "problem", None)) if each)
    where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{where}: {reason or error}{' (indent with spaces, not tabs)' if repr(chr(9)) in reason else ''}"


def _faults(node: yaml.Node | None) -> Iterator[str]:
    if node is None:
        yield "line 1: the file is empty"
    elif not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
        yield f"line {node.start_mark.line + 1}: the file has {kind}, not a mapping"
    else:
        faults = list(_faults_within(node, set(), set()))
        yield from faults
        if not faults and _expanded(node, {}) > MOST_VALUES:
            yield f"line {node.start_mark.line + 1}: its aliases expand to more than {MOST_VALUES:,} values"


def _expanded(node: yaml.Node, known: dict[int, int]) -> int:
    """Return the number of values below `node` with aliases expanded; `known`: cache by id."""
    if id(node) not in known:
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        children = node.value if isinstance(node, yaml.SequenceNode) else [value for _, value in pairs]
        known[id(node)] = 1 + sum(_expanded(child, known) for child in children)
    return known[id(node)]


def _faults_within(node: yaml.Node, above: set[int], seen: set[int]) -> Iterator[str]:
    """Yield duplicate keys of mappings (YAML would use the last), and anchors that contain themselves."""
    if id(node) in above:
        yield f"line {node.start_mark.line + 1}: an anchor contains itself"
    if id(node) in seen:
        return  # an alias, checked already
    seen.add(id(node))
    children = list(node.value) if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for name, value in node.value:
            line = name.start_mark.line + 1
            if not isinstance(name, yaml.ScalarNode) or name.tag not in KEY_TAGS:
                yield f"line {line}: the key is not text. Quote '{name.value}' if it is a name"
            elif first.setdefault(name.value, line) != line:
                yield f"line {line}: the key '{name.value}' is already on line {first[name.value]}"
            children.append(value)
    for child in children:
        yield from _faults_within(child, above | {id(node)}, seen)


def config_text(config: Config) -> str:
    """Return `config` as YAML for `train --config FILE`."""
    return str(yaml.dump(literal(config.model_dump()), Dumper=_DUMPER, sort_keys=False, allow_unicode=True))


def literal(value: Any) -> Any:
    """Return nested data with "${" in texts escaped, so that OmegaConf does not interpolate them."""
    if isinstance(value, str):
        return INTERPOLATION.sub(lambda found: f"{found[1] * 2}\\${{", value)
    if isinstance(value, dict):
        return {key: literal(each) for key, each in value.items()}
    return [literal(each) for each in value] if isinstance(value, list | tuple) else value


def without_escapes(value: Any) -> Any:
    """Return `value`, read from a config.yaml as plain YAML, with the escapes of texts removed."""
    if isinstance(value, str):
        return INTERPOLATION.sub(lambda found: f"{found[1][: len(found[1]) // 2]}${{", value)
    if isinstance(value, dict):
        return {key: without_escapes(each) for key, each in value.items()}
    return [without_escapes(each) for each in value] if isinstance(value, list) else value


def write_config(config: Config, file: Path) -> None:
    """Write `config` atomically, for `train --config FILE`."""
    partial = file.with_suffix(".partial")
    partial.write_text(config_text(config), encoding="utf-8")
    partial.rename(file)


@contextmanager
def in_memory(config: Config) -> Iterator[Path]:
    """Context that yields the path of a file with `config` in memory, for child processes.

    The file (memfd_create(2)) only has a path under /proc, and disappears with this process.
    """
    with os.fdopen(os.memfd_create("config.yaml"), "wb") as file:
        file.write(config_text(config).encode())
        file.flush()
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
