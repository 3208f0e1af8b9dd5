"""Resolving a composed or saved tree to a checked `Config` without interpolations, step laws or credentials.

`optim.learning_rate=step_law`, `data.global_batch_size=step_law` (both optionally times a number, `step_law*0.5`) and
`trainer.max_steps=20e9tokens` are replaced by numbers here, before anything is hashed or written.
"""

import importlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException
from omegaconf.resolvers.oc import env

from lightning_llm.base.errors import Problem
from lightning_llm.config.recipes import group_names
from lightning_llm.config.redact import note_interpolated, withheld
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.base import MOST_TOKENS
from lightning_llm.config.schema.data import LOADERS
from lightning_llm.config.schema.validation import HOW_MADE, ParsedConfig, read_config
from lightning_llm.config.weight_folders import INIT_FROM, UNNAMED
from lightning_llm.config.yaml_file import literal

RATE, BATCH, STEPS = ("optim", "learning_rate"), ("data", "global_batch_size"), ("trainer", "max_steps")
LAW = "lightning_llm.plan.step_law"
"""Counts parameters and ranks. Imported by name when needed, because `plan` is above this package."""
STAND_INS = {RATE: 1e-3, STEPS: 1}
LARGEST_FACTOR = 1e6
"""Largest factor of the law's rate or batch; the smallest is its inverse. Others are probably typos."""
FACTOR = re.compile(r"step_law(?:\s*\*\s*(?P<number>.*))?", re.IGNORECASE)
TOKENS = re.compile(r"(?P<number>[\d.]+(?:e[+-]?\d+)?)\s*tokens", re.IGNORECASE)


@dataclass(frozen=True)
class StepLawRequest:
    """Use of Step Law in a config: factors of its learning rate and batch size, and the run's length in tokens.

    None for a key that has a number already.
    """

    rate: float | None = None
    batch: float | None = None
    tokens: float | None = None


def _environment(name: str, *default: Any) -> Any:
    """Return the value of `oc.env` and record the variable, so that its value is never printed."""
    note_interpolated(name)
    return env(name, *default)


OmegaConf.register_new_resolver("oc.env", _environment, replace=True)


def read_tree(tree: DictConfig, stand_ins: Iterable[str] = (), *, to_build: bool = True) -> ParsedConfig:
    """Return the config of a composed or saved `tree`, resolved and checked, with its problems.

    `stand_ins`, `to_build`: see `validation.read_config`.
    """
    if flat := list(_no_groups(tree)):  # other keys cannot be resolved then
        return ParsedConfig(None, tuple(flat))
    found: dict[tuple[str, ...], Problem | None] = {_path(problem.key): problem for problem in _unnamed(tree)}
    if problem := _without_cluster(tree):
        found[("cluster",)] = problem
    if isinstance(root := OmegaConf.select(tree, "run.root", throw_on_missing=False), str) and root:
        OmegaConf.update(tree, "run.root", literal(str(Path(root).expanduser().absolute())))
    unresolvable = _resolve(tree, ())
    found |= {
        _path(key): Problem(key, f"a value must be given.{HOW_MADE.get(key, '')}")
        for key in sorted(OmegaConf.missing_keys(tree) - {INIT_FROM})  # optional for a plan
    }
    found |= unresolvable
    for path in found:
        if path[-1] != "name":
            OmegaConf.update(tree, ".".join(path), None)
    values: Any = OmegaConf.to_container(tree, resolve=True)
    make_paths_absolute(values)
    if isinstance(values.get("logger"), dict) and isinstance(values["logger"].get("tracking_uri"), str):
        values["logger"]["tracking_uri"] = withheld(values["logger"]["tracking_uri"])
    return _read_with_laws(values, found, lambda read, broken: read_config(read, broken, stand_ins, to_build=to_build))


def make_paths_absolute(values: dict[str, Any]) -> None:
    """Make the local paths of a resolved config absolute, in place."""
    data = _mapping(values, "data")
    paths = [(values, "resume"), (values, "branch_from"), (_mapping(values, "run"), "dir"), (data, "cache_dir")]
    if _mapping(values, "model").get("init_from") != UNNAMED:
        paths += [(_mapping(values, "model"), "init_from")]
    paths += [(_mapping(data, "tokenizer"), "path"), (_mapping(data, "mixture"), "scores")]
    paths += [(source, "path") for source in _mapping(data, "sources").values() if isinstance(source, dict)]
    if isinstance(teachers := _mapping(values, "distil").get("teachers"), list):
        values["distil"]["teachers"] = [
            str(Path(os.path.expanduser(each)).absolute()) if isinstance(each, str) and each else each
            for each in teachers
        ]
    for node, key in paths:
        value = node.get(key)
        if isinstance(value, str) and value and not _is_no_path(node, key, value):
            node[key] = str(Path(os.path.expanduser(value)).absolute())  # Path.expanduser raises for unknown users


def _is_no_path(node: Mapping[str, Any], key: str, value: str) -> bool:
    if key == "resume":
        return value == "auto"
    loader = node.get("loader")
    return isinstance(loader, str) and loader in LOADERS and not LOADERS[loader].is_local(value)


def _mapping(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _path(key: str) -> tuple[str, ...]:
    return tuple(key.split("."))


def _unnamed(tree: DictConfig) -> Iterator[Problem]:
    """Yield each group without a required `name`, and set a placeholder, since other keys depend on it."""
    for group, field in Config.model_fields.items():
        needed = getattr(field.annotation, "model_fields", {}).get("name")
        if needed is not None and needed.is_required() and isinstance(tree.get(group), DictConfig):
            if "name" in tree[group]:
                continue
            yield Problem(f"{group}.name", f"a value must be given: the NAME of this file in {group}=NAME.")
            OmegaConf.update(tree, f"{group}.name", "unnamed", force_add=True)


def _no_groups(tree: DictConfig) -> Iterator[Problem]:
    """Yield each group that has a single value instead of keys."""
    for group, field in Config.model_fields.items():
        keys = getattr(field.annotation, "model_fields", {})
        if not keys or group not in tree or OmegaConf.is_interpolation(tree, group):
            continue
        if not isinstance(value := tree[group], str):
            continue
        text = "must be a mapping. "
        if group in group_names():
            text += f"A preset selects a group's file under `defaults:`, with a line `- override /{group}: {value}`."
        else:
            text += f"Its keys are {', '.join(f'{group}.{key}' for key in keys)}."
        yield Problem(group, text, value)


def _without_cluster(tree: DictConfig) -> Problem | None:
    """Return the problem of keys of `cluster` that are set without a selected cluster, else None."""
    cluster = tree.get("cluster")
    if not isinstance(cluster, DictConfig) or not cluster or "name" in cluster or "hardware" in cluster:
        return None
    keys = ", ".join(f"cluster.{key}" for key in map(str, cluster))
    text = f"is none, and {keys} changes a figure of one. Select a cluster, e.g. cluster=h100_dgx."
    return Problem("cluster", text)


def _resolve(tree: DictConfig, above: tuple[str, ...]) -> dict[tuple[str, ...], Problem | None]:
    """Replace interpolations by their values in place, so that each is parsed once, which halves composition time.

    Return {path: problem} of keys that cannot be resolved; None if the cause is a missing key, which is reported
    anyway.
    """
    found: dict[tuple[str, ...], Problem | None] = {}
    for key in tree:
        path = (*above, str(key))
        if OmegaConf.is_missing(tree, key):
            continue
        try:
            value = tree[key]
        except InterpolationToMissingValueError:
            found[path] = None
        except (OmegaConfBaseException, RecursionError) as error:
            found[path] = Problem(".".join(path), f"{first_line(error)}.")
        else:
            if isinstance(value, DictConfig):
                found |= _resolve(value, path)
            elif OmegaConf.is_interpolation(tree, str(key)) and _is_plain(value):
                tree[key] = value
    return found


def _is_plain(value: Any) -> bool:
    """Return whether a resolved value can be stored in the tree as it is: no list, and no text with `$`."""
    return isinstance(value, bool | int | float | Path) or (isinstance(value, str) and "$" not in value)


def first_line(error: Exception) -> str:
    """Return the first line of the error's message, without a final period."""
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def _read_with_laws(
    values: dict[str, Any],
    broken: Mapping[tuple[str, ...], Problem | None],
    read: Callable[[Mapping[str, Any], Mapping[tuple[str, ...], Problem | None]], ParsedConfig],
) -> ParsedConfig:
    """Replace `step_law` and `tokens` in `values` by numbers, in place, and return `read(values, broken)`.

    Malformed ones are added to `broken`. If another problem prevents computing the law, its keys get placeholders.
    """
    asked: dict[tuple[str, str], float] = {}
    found = dict(broken)
    for path in (RATE, BATCH, STEPS):
        word = _at(values, path)
        if not isinstance(word, str) or path in found:
            continue
        number, problem = _number(word, path)
        if problem:
            found[path] = problem
            values[path[0]][path[1]] = None
        elif number is not None:
            asked[path] = number
            values[path[0]][path[1]] = STAND_INS.get(path) or _at(values, ("data", "micro_batch_size"))
    if not asked:
        return read(values, found)
    parsed = read(values, found)
    if parsed.config is None or parsed.problems:
        return parsed
    request = StepLawRequest(asked.get(RATE), asked.get(BATCH), asked.get(STEPS))
    replaced, law, problems = importlib.import_module(LAW).apply_step_law(values, request, parsed.config)
    if problems:
        return ParsedConfig(parsed.config, tuple(problems))
    final = read(replaced, found)
    if final.config is not None and law is not None:
        final.config._step_law = law
    return final


def _number(word: str, path: tuple[str, str]) -> tuple[float | None, Problem | None]:
    """Return (factor or tokens that `word` requests, problem); (None, None) for other texts."""
    match = (TOKENS if path == STEPS else FACTOR).fullmatch(word.strip())
    if match is None:
        return None, None
    least, most = (0, MOST_TOKENS) if path == STEPS else (1 / LARGEST_FACTOR, LARGEST_FACTOR)
    try:
        number = float(match["number"] or "1")
    except ValueError:
        number = math.nan
    if number > 0 and least <= number <= most:
        return number, None
    which = f"from {least:g} to {most:g} of step_law: step_law*0.5"
    if path == STEPS:
        which = f"above 0 of tokens, {most:g} at most: 20e9tokens"
    return None, Problem(".".join(path), f"must be a number {which}.", word)


def _at(values: Mapping[str, Any], path: tuple[str, str]) -> Any:
    group = values.get(path[0])
    return group.get(path[1]) if isinstance(group, dict) else None
