"""Classes as their source text shows them: where they are defined and what they derive from. Nothing is imported."""

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class SourceClass:
    """A class statement. `module` is the one that defines it, whatever it was imported through."""

    module: str
    node: ast.ClassDef

    @property
    def path(self) -> str:
        """The dotted path of the definition."""
        return f"{self.module}.{self.node.name}"


def find_class(path: str) -> SourceClass | None:
    """Return the class at the dotted `path`, through re-exports; None where the source text defines none there.

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    return _resolve(path, frozenset())


def lineage(found: SourceClass) -> Iterator[SourceClass]:
    """Yield the class and all it derives from, as far as source text shows it, nearest first."""
    seen, waiting = set(), [found]
    while waiting:
        current = waiting.pop(0)
        if current.path in seen:
            continue
        seen.add(current.path)
        yield current
        waiting += [base for each in current.node.bases if (base := _base(current.module, each))]


def names_in(module: str) -> list[str]:
    """Return the classes that `module` defines or imports by name. Raises ModuleNotFoundError."""
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
    """Return {name: dotted path} of what the import statements at the top of `module` bind."""
    file = source_file(module)
    package = module if file is not None and file.name == "__init__.py" else module.rpartition(".")[0]
    bound = {}
    for each in _statements(_tree(module)):
        if isinstance(each, ast.Import):
            for alias in each.names:
                bound[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(each, ast.ImportFrom):
            origin = each.module or ""
            if each.level:
                above = package.split(".")[: len(package.split(".")) - each.level + 1]
                origin = ".".join([*above, *([origin] if origin else [])])
            bound |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in each.names}
    return bound


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield a module's statements, those within `if` and `try` included."""
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
    except (SyntaxError, ValueError):  # whoever imports it is told
        return ast.Module([], [])


def source_file(module: str) -> Path | None:
    """Return the file of `module`, importing no parent but `lightning_llm` itself; None if it is no Python text.

    Raises:
        ModuleNotFoundError: there is no such module.
    """
    root, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(root)
    except ValueError as error:  # "__main__" has no spec
        raise ModuleNotFoundError(module) from error
    if spec is None:
        raise ModuleNotFoundError(module)
    if root == "lightning_llm":
        spec = importlib.util.find_spec(module)
        if spec is None:
            raise ModuleNotFoundError(module)
        return Path(spec.origin) if spec.origin else None
    for folder in map(Path, spec.submodule_search_locations or []):
        path = folder.joinpath(*rest)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    if rest or not spec.origin:
        raise ModuleNotFoundError(module)
    return Path(spec.origin) if spec.origin.endswith(".py") else None
