"""Arguments of a `_target_` node checked against the class's source text, without importing it.

A callback's class lives behind torch and Lightning, seconds of import that a typo should not cost. So the signature is
read from the file's syntax tree. A class that cannot be found so (built at run time, re-exported) is left to the call.
"""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

from lightning_llm.errors import Problem, did_you_mean

_SIMPLE_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
}


def check_target(key: str, node: Any) -> list[Problem]:
    """Return what is wrong with a `{_target_: package.module.Class, argument: value, ...}` node at `key`."""
    if node is None:
        return []
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        return [Problem(key, "must be a mapping with _target_: the dotted path of a class, or null.")]
    module, _, name = node["_target_"].rpartition(".")
    try:
        file = _source_file(module)
    except ModuleNotFoundError:
        return [
            Problem(f"{key}._target_", f"there is no module '{module}'. Check its spelling, or install what holds it.")
        ]
    if file is None:
        return []
    classes = {
        each.name: each for each in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(each, ast.ClassDef)
    }
    if name not in classes:
        if file.name == "__init__.py":
            return []  # a re-export, which only an import resolves
        return [Problem(f"{key}._target_", f"there is no class '{name}' in {module}.{did_you_mean(name, classes)}")]
    return _check_arguments(key, node, _signature(classes[name]))


def _source_file(module: str) -> Path | None:
    """Return the file of `module`, importing no parent but `lightning_llm` itself; None if it is no Python text."""
    root, *rest = module.split(".")
    spec = importlib.util.find_spec(root)
    if spec is None:
        raise ModuleNotFoundError(module)
    folders = [Path(each) for each in spec.submodule_search_locations or []]
    if root == "lightning_llm":
        spec = importlib.util.find_spec(module)
        if spec is None:
            raise ModuleNotFoundError(module)
        return Path(spec.origin) if spec.origin else None
    for folder in folders:
        path = folder.joinpath(*rest)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    if rest or not spec.origin:
        raise ModuleNotFoundError(module)
    return Path(spec.origin) if spec.origin.endswith(".py") else None


def _signature(node: ast.ClassDef) -> ast.arguments | None:
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return each.args
    return None


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
