"""Checks of a config's callbacks (class, arguments, monitored metrics) without importing them.

Only `callbacks.NAME` may name a class, and the class must derive from Lightning's Callback: any other callable
(`subprocess.Popen`) is rejected by every verb before anything is imported. Importing a callback imports torch and
Lightning, which takes seconds, so classes and signatures are read from syntax trees.
"""

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import Problem, did_you_mean
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.aliases import CALLBACK, LIGHTNING_CALLBACKS, REFUSED_CALLBACKS

_SIMPLE_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
}
STOPS = "lightning.pytorch.callbacks.early_stopping.EarlyStopping"
LOGS_RATES = "lightning.pytorch.callbacks.lr_monitor.LearningRateMonitor"
SHIPPED = ("lightning", "lightning_llm")
"""Packages with callbacks that log no further metrics, except `LOGS_RATES`."""


@dataclass(frozen=True)
class SourceClass:
    """A class as its source text defines it: the module, and the class statement as a syntax tree."""

    module: str
    node: ast.ClassDef

    @property
    def path(self) -> str:
        """The dotted path `module.NAME` of the definition."""
        return f"{self.module}.{self.node.name}"


def check_target(key: str, node: Any, others: Iterable[str] = ()) -> list[Problem]:
    """Return the problems of one callback in a config: its class, and the arguments that the class does not take.

    Args:
        key: its key, callbacks.NAME.
        node: its value: {_target_: package.module.Class, argument: value, ...}, or None.
        others: names of callbacks to suggest if `node` is not a mapping with a class.
    """
    if node is None:
        return []
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        meant = did_you_mean(key.rpartition(".")[2], others)
        text = "must be a mapping with _target_: the dotted path of a callback's class, or null."
        return [Problem(key, text + (meant if "Did you mean" in meant else ""))]
    hidden = [*_hidden_keys(node, key)]
    if hidden:
        return [
            Problem(each, "is not allowed here: only the callback itself may name a class. Remove it.")
            for each in hidden
        ]
    target = node["_target_"]
    try:
        found = find_class(target)
        known = [] if found else names_in(target.rpartition(".")[0])
    except ModuleNotFoundError:
        return [Problem(f"{key}._target_", _no_module(target))]
    if found is None:
        text = f"there is no class '{target.rpartition('.')[2]}' in the source of {target.rpartition('.')[0]}."
        return [Problem(f"{key}._target_", f"{text}{did_you_mean(target.rpartition('.')[2], known)}")]
    parents = list(lineage(found))
    if problem := refused(target, [each.path for each in parents]):
        return [Problem(f"{key}._target_", problem, target)]
    return _check_arguments(key, node, _signature(parents))


def refused(target: str, lineage_paths: list[str]) -> str | None:
    """Return the problem of the class `target` as a callback, as text; None if it can be one.

    `lineage_paths`: dotted paths of the class and its bases, its own first.
    """
    if any(path.startswith("pytorch_lightning.") for path in lineage_paths):
        return "is of the package pytorch_lightning. Use lightning.pytorch, its current name."
    if CALLBACK not in lineage_paths:
        return "must be a class derived from lightning.pytorch.Callback."
    for path in lineage_paths:
        name = path.rpartition(".")[2]
        if path.startswith("lightning.pytorch.") and name in REFUSED_CALLBACKS:
            what = name if target.endswith(f".{name}") else f"{target.rpartition('.')[2]} (a {name})"
            return f"{what} conflicts with this trainer: {REFUSED_CALLBACKS[name]}."
    return None


def _hidden_keys(node: dict[str, Any], key: str) -> Iterator[str]:
    """Yield the keys that Hydra would not treat as arguments: nested classes, positional arguments, ..."""
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
        return f"there is no '{module}': give --config-dir DIR, the folder with callbacks/*.py."
    if not module and target in names_in(LIGHTNING_CALLBACKS):
        return f"is '{target}', and must be package.module.Class. Lightning's is {LIGHTNING_CALLBACKS}.{target}."
    hint = (
        "Check the spelling, or install the package. For your own class use --config-dir DIR (docs/howto/callbacks.md)"
    )
    return f"there is no module '{module}'. {hint}." if module else f"is '{target}', and must be package.module.Class."


def _signature(classes: list[SourceClass]) -> ast.arguments | None:
    """Return the arguments of the first `__init__` of a class and its bases; None if a decorator generates it."""
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
            problems.append(Problem(f"{key}.{name}", f"must be of type {annotation}.", repr(value)))
    return problems


def _fits(value: Any, annotation: str) -> bool:
    """Return False only if `annotation` is a union of simple types and `value` has none of them."""
    names = re.split(r"\s*\|\s*", annotation)
    if any(name not in _SIMPLE_TYPES for name in names):
        return True
    allowed = tuple(kind for name in names for kind in _SIMPLE_TYPES[name])
    return isinstance(value, allowed) and not (isinstance(value, bool) and bool not in allowed)


def metric_names(config: Config) -> list[str]:
    """Return the names of a run's metrics: those of every step, then those of a validation."""
    precision = config.precision
    steps = ["loss", "lr", "grad_norm", *(["loss_scale"] if precision.loss_scaling else [])]
    if not config.data.validation.fraction and not config.data.watched:
        return steps
    views = ["val_loss", *(["val_loss_high_precision"] if precision.quantizes else [])]
    return [*steps, *views, *(f"{view}/{source}" for view in views for source in config.data.sources)]


def monitor_problems(config: Config) -> Iterator[Problem]:
    """Yield a problem for each EarlyStopping with a metric that no one logs; none if a user's callback might log it."""
    classes = {name: _lineage(node) for name, node in config.callbacks.items() if node}
    if any(paths and paths[0].partition(".")[0] not in SHIPPED for paths in classes.values()):
        return
    known = metric_names(config)
    for name, paths in classes.items():
        monitor = (config.callbacks[name] or {}).get("monitor")
        if STOPS not in paths or not isinstance(monitor, str) or monitor in known:
            continue
        if monitor.startswith("lr-") and any(LOGS_RATES in each for each in classes.values()):
            continue
        key = f"callbacks.{name}.monitor"
        if monitor.startswith("val_loss") and "val_loss" not in known:
            yield Problem(
                key, f"is '{monitor}', and data.validation.fraction=0 holds out nothing to validate on. Raise it."
            )
        else:
            yield Problem(key, f"is '{monitor}', which this run does not log.{did_you_mean(monitor, known)}")


def _lineage(node: dict[str, object]) -> list[str]:
    """Return the paths of a callback's class and its bases, nearest first; [] if the source is unknown."""
    try:
        found = find_class(str(node.get("_target_")))
    except ModuleNotFoundError:  # reported by another rule
        return []
    return [each.path for each in lineage(found)] if found else []


def find_class(path: str) -> SourceClass | None:
    """Return the class at the dotted `path` from source text, following re-exports; None if its module has none.

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    return _resolve(path, frozenset())


def lineage(found: SourceClass) -> Iterator[SourceClass]:
    """Yield the class and its bases, nearest first, as far as the source text shows them."""
    seen, waiting = set(), [found]
    while waiting:
        current = waiting.pop(0)
        if current.path in seen:
            continue
        seen.add(current.path)
        yield current
        waiting += [base for each in current.node.bases if (base := _base(current.module, each))]


def names_in(module: str) -> list[str]:
    """Return the names of the classes that `module` defines or imports. Raises ModuleNotFoundError."""
    tree = _tree(module)
    found = [each.name for each in _statements(tree) if isinstance(each, ast.ClassDef)]
    return found + [name for name in _imports(module) if name[0].isupper()]


def _resolve(path: str, seen: frozenset[str]) -> SourceClass | None:
    module, _, name = path.rpartition(".")
    if not module or path in seen:
        return None
    for each in _statements(_tree(module)):
        if isinstance(each, ast.ClassDef) and each.name == name:
            return SourceClass(module, each)
    target = _imports(module).get(name)
    if target is None:
        return None
    try:
        return _resolve(target, seen | {path})
    except ModuleNotFoundError:
        return None


def _base(module: str, node: ast.expr) -> SourceClass | None:
    """Return the class that the expression `node` in a class statement of `module` names."""
    while isinstance(node, ast.Subscript):  # Generic[T]
        node = node.value
    name, _, rest = ast.unparse(node).partition(".")
    target = _imports(module).get(name, f"{module}.{name}")
    try:
        return _resolve(f"{target}.{rest}" if rest else target, frozenset())
    except ModuleNotFoundError:
        return None


def _imports(module: str) -> dict[str, str]:
    """Return {name: dotted path} of the imports at the top of `module`."""
    file = source_file(module)
    package = module if file is not None and file.name == "__init__.py" else module.rpartition(".")[0]
    bound = {}
    for each in _statements(_tree(module)):
        if isinstance(each, ast.Import):
            for alias in each.names:
                path = alias.name if alias.asname else alias.name.partition(".")[0]
                bound[alias.asname or path] = path
        elif isinstance(each, ast.ImportFrom):
            origin = each.module or ""
            if each.level:
                above = package.split(".")[: len(package.split(".")) - each.level + 1]
                origin = ".".join([*above, *([origin] if origin else [])])
            bound |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in each.names}
    return bound


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield a module's statements, including those within `if` and `try`."""
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        each = waiting.pop(0)
        yield each
        if isinstance(each, ast.If | ast.Try):
            waiting += [*each.body, *each.orelse]


def _tree(module: str) -> ast.Module:
    file = source_file(module)
    return _parse(file, file.stat().st_mtime_ns) if file else ast.Module([], [])


@cache
def _parse(file: Path, changed_ns: int) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError):  # importing it reports the error
        return ast.Module([], [])


@cache
def _own_file(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    if spec is None:
        raise ModuleNotFoundError(module)
    return Path(spec.origin) if spec.origin else None


@cache
def _lightning() -> ModuleSpec | None:
    """Return the spec of Lightning; cached, since each job of a sweep looks up its callbacks."""
    return importlib.util.find_spec("lightning")


def source_file(module: str) -> Path | None:
    """Return the file of `module` without importing parents except `lightning_llm`; None if it is not Python source.

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    root, *rest = module.split(".")
    if root == "lightning_llm":
        return _own_file(module)
    try:
        spec = _lightning() if root == "lightning" else importlib.util.find_spec(root)
    except ValueError as error:  # "__main__" has no spec
        raise ModuleNotFoundError(module) from error
    if spec is None:
        raise ModuleNotFoundError(module)
    for folder in map(Path, spec.submodule_search_locations or []):
        path = folder.joinpath(*rest)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    if rest or not spec.origin:
        raise ModuleNotFoundError(module)
    return Path(spec.origin) if spec.origin.endswith(".py") else None
