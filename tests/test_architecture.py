"""The map of docs/internals/architecture.md: floors, libraries, cycles, module sizes and names, mirrored tests."""

import ast
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from lightning_llm.config.schema.cast_kinds import SCALES
from lightning_llm.config.schema.data import LOADERS, MIXTURES, SCORERS
from lightning_llm.config.schema.model import FEED_FORWARDS, MIXERS, NORMS
from lightning_llm.config.schema.optim import ALGORITHMS, OPTIMIZERS, SCHEDULES

ROOT = Path(__file__).parent.parent
FLOORS: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("linalg",),
    ("config",),
    ("model", "precision", "data", "optim"),
    ("plan",),
    ("parallel", "tracking"),
    ("health", "train"),
    ("callbacks",),
    ("compare", "dry_run", "run"),
    ("algoperf", "evaluate", "golden", "ladder", "probe", "sweep"),
    ("cli",),
    ("api",),
    ("__main__",),
)
"""Every package on one floor: it imports from floors below its own, never from its neighbors on the floor."""
REGISTRIES = (ALGORITHMS, FEED_FORWARDS, LOADERS, MIXERS, MIXTURES, NORMS, OPTIMIZERS, SCALES, SCHEDULES, SCORERS)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
TORCH_FREE = {"base", "config", "plan", "tracking", "compare", "ladder", "algoperf", "api", "__main__"}
LIBRARIES = {
    "torch": {"base.hardware", *(FLOOR_OF.keys() - TORCH_FREE)},
    "lightning": {"train", "callbacks", "run", "golden", "evaluate"},
    "hydra": {"config", "run", "sweep", "cli"},
    "mlflow": {"tracking", "compare"},
}
"""Packages, or single modules, that may import libraries that are slow to import or hard to replace."""
MOST_PACKAGES = 22
FACE = {"__init__.py", "__main__.py", "api.py", "py.typed"}
"""The loose files at the top of the package."""
WITHOUT_PACKAGE = {"chaos", "docs", "examples", "frozen", "gpu_check", "packaging", "security"}
"""Folders of tests about the whole: faults at random, documents, example kinds, recorded facts, GPUs, ..."""
FORBIDDEN_NAMES = {"utils", "helpers", "common", "manager"}


@cache
def modules() -> dict[str, Path]:
    found = {}
    for file in [*ROOT.glob("lightning_llm/**/*.py"), *ROOT.glob("callbacks/**/*.py")]:
        parts = list(file.relative_to(ROOT).with_suffix("").parts)
        if parts[0] == "callbacks":
            parts.insert(0, "lightning_llm")
        found[".".join(part for part in parts if part != "__init__")] = file
    return found


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports_of(file: Path, *, module_level: bool = False, typing: bool = True) -> set[str]:
    """Return the dotted names that `file` imports; `typing`: those under `if TYPE_CHECKING`, too."""
    names: set[str] = set()

    def visit(nodes: list[ast.stmt]) -> None:
        for node in nodes:
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
            elif not module_level and (typing or not _is_type_checking(node)):
                visit(list(ast.iter_child_nodes(node)))  # type: ignore[arg-type]

    visit(parsed(file).body)
    return names


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def top_of(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def test_every_module_has_a_floor():
    tops = {top_of(module) for module in modules()} - {""}
    assert tops == FLOOR_OF.keys()


def violations(module: str, imported: set[str]) -> list[str]:
    own = top_of(module)
    if not own:
        return []
    found = []
    for name in imported:
        library = name.split(".")[0]
        if name == "lightning_llm":
            found.append(f"{module} imports from the package's top level, which names things of all floors")
        elif library == "lightning_llm":
            other = top_of(name)
            if other != own and FLOOR_OF.get(other, -1) >= FLOOR_OF[own]:
                found.append(f"{module} (floor {FLOOR_OF[own]}) imports {name} (floor {FLOOR_OF[other]})")
        elif library in LIBRARIES and not {own, module.removeprefix("lightning_llm.")} & LIBRARIES[library]:
            found.append(f"{module} imports {name}, which {sorted(LIBRARIES[library])} may")
    return found


def test_imports_point_down():
    found = {module: violations(module, imports_of(file)) for module, file in modules().items()}
    assert {module: each for module, each in found.items() if each} == {}


def test_the_rule_finds_a_violation():
    assert violations("lightning_llm.model.x", {"lightning_llm.train.module"})
    assert violations("lightning_llm.model.x", {"lightning_llm.data.corpus"})
    assert violations("lightning_llm.data.x", {"lightning.pytorch"})
    assert violations("lightning_llm.plan.x", {"torch.distributed"})
    assert violations("lightning_llm.cli.x", {"lightning_llm"})
    assert not violations("lightning_llm.train.x", {"lightning_llm.data.corpus", "lightning.pytorch"})


def test_no_import_cycle():
    """Neither while modules are imported nor by imports within functions."""
    known = modules()
    graph = {name: imports_of(file, typing=False) & known.keys() - {name} for name, file in known.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_few_packages_and_loose_files():
    top = ROOT / "lightning_llm"
    assert {path.name for path in top.iterdir() if path.is_file()} == FACE
    assert len([*top.glob("*/__init__.py")]) <= MOST_PACKAGES


def test_every_module_of_callbacks_has_a_callback_that_yaml_can_name():
    for module, file in modules().items():
        if module.startswith("lightning_llm.callbacks."):
            bases = [
                ast.unparse(base) for node in parsed(file).body if isinstance(node, ast.ClassDef) for base in node.bases
            ]
            assert any(base.rpartition(".")[2] == "Callback" for base in bases), module


def test_no_module_stands_in_for_another():
    """A kind's description is torch-free, and its class names the module that is built."""
    assert not [module for module in modules() if module.endswith("_spec")]


def test_tests_mirror_the_packages():
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and [*path.glob("*.py")]}
    assert folders - WITHOUT_PACKAGE <= FLOOR_OF.keys()
    for folder in folders - WITHOUT_PACKAGE:
        inner = {path.parent.relative_to(ROOT / "tests" / folder) for path in (ROOT / "tests" / folder).rglob("*.py")}
        package = ROOT / "lightning_llm" / folder if folder != "callbacks" else ROOT / "callbacks"
        assert all((package / each).is_dir() for each in inner), folder


def test_the_package_list_is_complete():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = set()
    for file in (
        file for top in ("lightning_llm", "callbacks", "conf", "recipes") for file in ROOT.glob(f"{top}/**/__init__.py")
    ):
        parts = file.parent.relative_to(ROOT).parts
        found.add(".".join(parts if parts[0] == "lightning_llm" else ("lightning_llm", *parts)))
    assert listed == found


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda each: each.noun)
def test_modules_of_kinds_import_no_torch(registry):
    imported = {name for module in registry.modules for name in imports_of(modules()[module], module_level=True)}
    assert not [name for name in imported if name.split(".")[0] in ("torch", "lightning", "transformers")]


def test_no_vague_names():
    assert not [module for module in modules() if FORBIDDEN_NAMES & set(module.split("."))]


def test_files_stay_readable():
    lines = {module: len(file.read_text().splitlines()) for module, file in modules().items()}
    assert {module: count for module, count in lines.items() if count > 400} == {}


def test_user_input_is_never_asserted():
    found = [
        f"{module}:{node.lineno}"
        for module, file in modules().items()
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_transformer_engine_is_imported_in_one_file_and_never_at_import():
    def imports_it(file: Path, *, module_level: bool = False) -> bool:
        return any(name.startswith("transformer_engine") for name in imports_of(file, module_level=module_level))

    users = [file for file in modules().values() if imports_it(file)]
    assert len(users) <= 1
    assert not any(imports_it(file, module_level=True) for file in users)
