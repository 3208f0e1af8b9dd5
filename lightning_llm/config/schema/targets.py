"""The classes that a config may name, and their arguments, checked against source text without importing it.

Only `callbacks.NAME` may name a class, and only one that derives from Lightning's Callback: whatever else is callable
(`subprocess.Popen`) is refused by every verb, before anything is imported. A callback's class lives behind torch and
Lightning, seconds of import that a typo should not cost; so classes and signatures are read from files' syntax trees.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from typing import Any

from lightning_llm.base.errors import Problem, did_you_mean
from lightning_llm.config.schema.class_source import SourceClass, find_class, lineage, names_in
from lightning_llm.config.schema.lightning_keys import CALLBACK, LIGHTNING_CALLBACKS, REFUSED_CALLBACKS

_SIMPLE_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
}


def check_target(key: str, node: Any, others: Iterable[str] = ()) -> list[Problem]:
    """Return what is wrong with a `{_target_: package.module.Class, argument: value, ...}` node at `key`.

    `others`: names of callbacks that `key` could be meant for.
    """
    if node is None:
        return []
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        meant = did_you_mean(key.rpartition(".")[2], others)
        text = "must be a mapping with _target_: the dotted path of a callback's class, or null."
        return [Problem(key, text + (meant if "Did you mean" in meant else ""))]
    hidden = [*_hidden_keys(node, key)]
    if hidden:
        return [Problem(each, "may not stand here: only the callback itself names a class.") for each in hidden]
    target = node["_target_"]
    try:
        found = find_class(target)
        known = [] if found else names_in(target.rpartition(".")[0])
    except ModuleNotFoundError:
        return [Problem(f"{key}._target_", _no_module(target))]
    if found is None:
        text = f"there is no class '{target.rpartition('.')[2]}' in {target.rpartition('.')[0]}, as far as its source "
        return [Problem(f"{key}._target_", f"{text}text shows.{did_you_mean(target.rpartition('.')[2], known)}")]
    parents = list(lineage(found))
    if problem := refused(target, [each.path for each in parents]):
        return [Problem(f"{key}._target_", problem)]
    return _check_arguments(key, node, _signature(parents))


def refused(target: str, lineage_paths: list[str]) -> str | None:
    """Return why the class `target` cannot be a callback here, None if it can; `lineage_paths`: what it derives from.

    The paths are those of the definitions, the class's own first.
    """
    if any(path.startswith("pytorch_lightning.") for path in lineage_paths):
        return (
            f"is {target}, of the package pytorch_lightning. Take lightning.pytorch, its name today, which runs here."
        )
    if CALLBACK not in lineage_paths:
        return f"is {target}, and that is no callback: name a class derived from lightning.pytorch.Callback."
    for path in lineage_paths:
        name = path.rpartition(".")[2]
        if path.startswith("lightning.pytorch.") and name in REFUSED_CALLBACKS:
            what = name if target.endswith(f".{name}") else f"{target.rpartition('.')[2]} (a {name})"
            return f"{what} would fight the strategy here: {REFUSED_CALLBACKS[name]}."
    return None


def _hidden_keys(node: dict[str, Any], key: str) -> Iterator[str]:
    """Yield the keys that Hydra would take for more than an argument: a class deeper down, positional arguments, ..."""
    for name, value in node.items():
        if str(name).startswith("_") and name != "_target_":
            yield f"{key}.{name}"
        yield from _targets_within(value, f"{key}.{name}")


def _targets_within(value: Any, key: str) -> Iterator[str]:
    if isinstance(value, dict):
        if "_target_" in value:
            yield f"{key}._target_"
        for name, each in value.items():
            yield from _targets_within(each, f"{key}.{name}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _targets_within(each, f"{key}.{index}")


def _no_module(target: str) -> str:
    module = target.rpartition(".")[0]
    if module.partition(".")[0] == "config_dir":
        return f"there is no '{module}': give --config-dir DIR, the folder whose callbacks/*.py it names."
    if not module and target in names_in(LIGHTNING_CALLBACKS):
        return f"is '{target}', and must be package.module.Class. Lightning's is {LIGHTNING_CALLBACKS}.{target}."
    hint = "Check its spelling, or install what holds it. A class of your own: --config-dir DIR (docs/callbacks.md)"
    return f"there is no module '{module}'. {hint}." if module else f"is '{target}', and must be package.module.Class."


def _signature(classes: list[SourceClass]) -> ast.arguments | None:
    """Return the arguments of the first `__init__` among a class and its parents; None where a decorator writes it."""
    for each in classes:
        if each.node.decorator_list:
            return None
        for statement in each.node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                return statement.args
    return ast.arguments([], [ast.arg("self")], None, [], [], None, [])


def _check_arguments(key: str, node: dict[str, Any], signature: ast.arguments | None) -> list[Problem]:
    if signature is None or signature.kwarg is not None:
        return []
    positional = signature.args[1:]
    required = {each.arg for each in positional[: len(positional) - len(signature.defaults)]}
    required |= {
        each.arg for each, default in zip(signature.kwonlyargs, signature.kw_defaults, strict=True) if default is None
    }
    known = {each.arg: each.annotation for each in [*positional, *signature.kwonlyargs]}
    given = {name: value for name, value in node.items() if not name.startswith("_")}
    problems = [
        Problem(f"{key}.{name}", f"unknown argument of {node['_target_']}.{did_you_mean(name, known)}")
        for name in given
        if name not in known
    ]
    problems += [Problem(f"{key}.{name}", "a value must be given.") for name in sorted(required - set(given))]
    for name, value in given.items():
        declared = known.get(name)
        annotation = ast.unparse(declared) if declared is not None else ""
        if annotation and not _fits(value, annotation):
            problems.append(Problem(f"{key}.{name}", f"is {value!r}, must be of type {annotation}."))
    return problems


def _fits(value: Any, annotation: str) -> bool:
    """Return False only where `annotation` is a union of simple types and `value` is of none of them."""
    names = re.split(r"\s*\|\s*", annotation)
    if any(name not in _SIMPLE_TYPES for name in names):
        return True
    allowed = tuple(kind for name in names for kind in _SIMPLE_TYPES[name])
    return isinstance(value, allowed) and not (isinstance(value, bool) and bool not in allowed)
