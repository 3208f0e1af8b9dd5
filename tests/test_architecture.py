"""Imports point down, every package is shipped, nothing imports in a circle."""

import ast
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    0: {
        "commands",
        "config_package",
        "errors",
        "hardware",
        "identity",
        "integrity",
        "keyed_hash",
        "redact",
        "registry",
        "schema",
        "terminal_text",
        "waiting",
        "workspace",
    },
    1: {"model", "precision", "data", "optim"},
    2: {"parallel"},
    3: {"train"},
    4: {"callbacks"},
    5: {
        "agreement",
        "build",
        "check",
        "checked_config",
        "compare",
        "completion",
        "compose",
        "composition",
        "config_file",
        "config_source",
        "config_listing",
        "conform",
        "earlier_parts",
        "hydra_options",
        "launch",
        "matrix",
        "named_casts",
        "overrides",
        "plan",
        "probe",
        "ranks",
        "recipes_catalog",
        "resolve",
        "run",
        "run_place",
        "run_state",
        "start_lines",
        "sweep",
        "sync",
        "tracking_ui",
        "yaml_file",
    },
    6: {"__main__"},
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}
FREE_WITHIN = {0, 5}
"""Layers whose members may import each other; elsewhere a layer's packages are siblings."""
ONLY_FROM = {"lightning": 3, "hydra": 5, "mlflow": 4}
FORBIDDEN_NAMES = {"utils", "helpers", "common", "manager"}


def modules() -> dict[str, Path]:
    found = {}
    for file in [*ROOT.glob("lightning_llm/**/*.py"), *ROOT.glob("callbacks/**/*.py")]:
        parts = list(file.relative_to(ROOT).with_suffix("").parts)
        if parts[0] == "callbacks":
            parts.insert(0, "lightning_llm")
        found[".".join(part for part in parts if part != "__init__")] = file
    return found


def imports_of(file: Path, *, module_level: bool = False) -> set[str]:
    tree = ast.parse(file.read_text())
    nodes = tree.body if module_level else list(ast.walk(tree))
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def top_of(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def test_every_module_has_a_layer():
    tops = {top_of(module) for module in modules()} - {""}
    assert tops <= LAYER_OF.keys(), f"give these a layer: {sorted(tops - LAYER_OF.keys())}"


def violations(module: str, imported: set[str]) -> list[str]:
    own, layer = top_of(module), LAYER_OF.get(top_of(module))
    if layer is None:
        return []
    found = []
    for name in imported:
        if name.startswith("lightning_llm."):
            target = top_of(name)
            other = LAYER_OF.get(target)
            if other is None or target == own:
                continue
            if other > layer or (other == layer and layer not in FREE_WITHIN):
                found.append(f"{module} (layer {layer}) imports {name} (layer {other})")
        elif (least := ONLY_FROM.get(name.split(".")[0])) is not None and layer < least:
            found.append(f"{module} (layer {layer}) imports {name}, allowed from layer {least}")
    return found


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_down(module):
    assert violations(module, imports_of(modules()[module])) == []


def test_the_rule_finds_a_violation():
    assert violations("lightning_llm.model.x", {"lightning_llm.train.module"})
    assert violations("lightning_llm.model.x", {"lightning_llm.data.corpus"})
    assert violations("lightning_llm.data.x", {"lightning.pytorch"})
    assert not violations("lightning_llm.train.x", {"lightning_llm.data.corpus", "lightning.pytorch"})


def test_no_import_cycle():
    known = modules()
    graph = {name: imports_of(file, module_level=True) & known.keys() - {name} for name, file in known.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_package_list_is_complete():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = set()
    for file in (
        file for top in ("lightning_llm", "callbacks", "conf", "recipes") for file in ROOT.glob(f"{top}/**/__init__.py")
    ):
        parts = file.parent.relative_to(ROOT).parts
        found.add(".".join(parts if parts[0] == "lightning_llm" else ("lightning_llm", *parts)))
    assert listed == found


@pytest.mark.parametrize("module", sorted(name for name in modules() if name.endswith("_spec")))
def test_descriptions_of_kinds_import_no_torch(module):
    imported = imports_of(modules()[module], module_level=True)
    assert not [name for name in imported if name.split(".")[0] in ("torch", "lightning", "transformers")]


def test_no_vague_names():
    assert not [module for module in modules() if FORBIDDEN_NAMES & set(module.split("."))]


@pytest.mark.parametrize("module", sorted(modules()))
def test_files_stay_readable(module):
    assert len(modules()[module].read_text().splitlines()) <= 400


def test_user_input_is_never_asserted():
    found = [
        f"{module}:{node.lineno}"
        for module, file in modules().items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_transformer_engine_is_imported_in_one_file_and_never_at_import():
    def imports_it(file: Path, *, module_level: bool = False) -> bool:
        return any(name.startswith("transformer_engine") for name in imports_of(file, module_level=module_level))

    users = [file for file in modules().values() if imports_it(file)]
    assert len(users) <= 1
    assert not any(imports_it(file, module_level=True) for file in users)
