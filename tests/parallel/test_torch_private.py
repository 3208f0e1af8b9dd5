"""Undocumented interfaces of torch: the list is complete, the installed torch has them, one that is gone is named."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from lightning_llm.base.errors import ConfigError
from lightning_llm.parallel import pp_stage, torch_private
from lightning_llm.parallel.pp_stage import TrainStage
from lightning_llm.parallel.torch_private import INTERFACES, TESTED, check_overridden, moved, private

ROOT = Path(__file__).parents[2]


def test_the_range_of_torch_is_one_wherever_it_stands():
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch{TESTED}" in requirements
    low, high = (tuple(map(int, bound.lstrip(">=<").split("."))) for bound in TESTED.split(","))
    assert f"{low} <= tuple(" in (ROOT / "Makefile").read_text()
    assert f"< {high}" in (ROOT / "Makefile").read_text()
    assert low <= tuple(map(int, torch.__version__.split(".")[:2])) < high


def test_a_part_that_is_gone_is_named_with_the_range(monkeypatch):
    assert private(torch, "never_was", "tensor") is torch.tensor
    monkeypatch.delattr(torch.distributed.DeviceMesh, "_flatten")
    with pytest.raises(ConfigError, match=r"has no DeviceMesh._flatten, .* Install torch>=2.11,<2.16"):
        private(torch.distributed.DeviceMesh, "_flatten")


def test_a_changed_signature_of_an_overridden_method_is_an_error(monkeypatch):
    check_overridden(TrainStage, "backward_one_chunk")

    def backward_one_chunk(self, chunk, loss=None):
        pass

    monkeypatch.setattr(PipelineStage, "backward_one_chunk", backward_one_chunk)
    with pytest.raises(ConfigError, match=r"PipelineStage.backward_one_chunk\(self, chunk, loss\), not \(self, bwd_"):
        check_overridden(TrainStage, "backward_one_chunk")


def test_the_installed_torch_has_every_listed_interface():
    assert list(moved()) == []
    pp_stage._check_torch()


@pytest.mark.parametrize(
    ("name", "given", "line"),
    [
        ("torch.autograd._gone", "x", "torch.autograd._gone is missing"),
        ("torch._gone.Kind.method", None, "torch._gone.Kind.method is missing"),
        ("torch.distributed._gone|isend", "tensor dst group", None),
        ("torch.distributed.isend", "tensor group", None),
        (
            "torch.distributed.isend",
            "tensor dst stream",
            "isend takes (tensor dst group tag group_dst), not (tensor dst st",
        ),
        ("torch.distributed.isend", "dst tensor", "isend takes (tensor dst group tag group_dst), not (dst tensor)"),
        ("torch.distributed.isend", "dst", "isend takes (tensor dst group tag group_dst), not (dst)"),
        ("torch._foreach_mul_", "self scalars", None),
        ("torch._foreach_mul_", "self factor", "_foreach_mul_ takes (self scalar) or (self other) or (self scalars)"),
    ],
)
def test_an_interface_that_moved_is_named(name, given, line, monkeypatch):
    monkeypatch.setattr(torch_private, "INTERFACES", {name: given})
    found = list(moved())
    assert (line is None and not found) or line in found[0]


def test_every_undocumented_interface_in_use_is_listed():
    listed = {f"{key.rpartition('.')[0]}.{each}" for key in INTERFACES for each in key.rpartition(".")[2].split("|")}
    used, by_call = {}, set[str]()
    for folder in ("lightning_llm", "callbacks"):
        for file in (ROOT / folder).rglob("*.py"):
            text = file.read_text()
            for names in re.findall(r'\bprivate\([\w.]+((?:, "\w+")+)', text):
                by_call.update(re.findall(r"\w+", names))
            if re.search(r"\btorch(\.\w+)*\._|\bimport .*\b_\w", text):
                used |= dict.fromkeys(_undocumented(ast.parse(text)), file.name)
    of_instances = {"_fsdp_param_group"}  # set by FSDPState's constructor
    assert by_call - of_instances - {part for each in listed for part in each.split(".")} == set()
    assert used["torch._fused_sdp_choice"] == "kernel_choice.py"
    assert used["torch.utils._pytree.tree_leaves"] == "counting.py"
    assert {name: file for name, file in used.items() if not _covers(listed, name)} == {}


def _undocumented(tree: ast.Module) -> Iterator[str]:
    """Yield the full names below `torch` in `tree` that have a part with a leading underscore."""
    full_names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            full_names |= {
                each.asname or each.name.partition(".")[0]: each.name if each.asname else "torch"
                for each in node.names
                if each.name.partition(".")[0] == "torch"
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            full_names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    chains = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for chain in [*full_names, *chains]:
        first, _, rest = chain.partition(".")
        if first in full_names and re.fullmatch(r"[\w.]*", chain):
            name = f"{full_names[first]}.{rest}".rstrip(".")
            if re.search(r"\._(?!_)", name):
                yield name


def _covers(listed: set[str], name: str) -> bool:
    """Return whether `name` is listed, or is the module or class of a listed name, or an attribute of one."""
    return any(f"{each}.".startswith(f"{name}.") or name.startswith(f"{each}.") for each in listed)
