"""Casts of parts on two ranks: findings over gloo and stand-in kernels, and the processes of `gpu_check`. 3 seconds."""

import pytest
import torch

from gpu_check import parts
from gpu_check.parts import findings, on_ranks
from lightning_llm.precision.native import transformer_engine as te
from tests.parallel.test_native_over_ranks import BLACKWELL, HOPPER, library_on
from tests.precision.recipes import load

CPU = torch.device("cpu")


def found_on(recipe, device, withdrawn):
    """Return the findings; `withdrawn`: the library casts each part by its own amax. All ranks must call it."""
    with library_on(device) as patch:
        if withdrawn:
            patch.setattr(te, "share_amaxes", lambda kernel, groups: None)
        return findings(load(recipe), CPU, CPU)


@pytest.mark.parametrize(("recipe", "device"), [("fp8_current", HOPPER), ("nvfp4", BLACKWELL)])
def test_products_of_parts_show_whether_ranks_share_amaxes(recipe, device, ranks):
    found = ranks(2).call(found_on, recipe, device, False)
    assert [each["layout"] for each in found] == ["tp", "cp"]
    assert [each["problems"] for each in found] == [[], []]
    names = {"y"} if recipe == "nvfp4" else {"y", "dx", "dw"}
    assert [each["differences"] for each in found] == [dict.fromkeys(names, 0.0)] * 2
    wrong = ranks(2).call(found_on, recipe, device, True)
    assert all(each["problems"] for each in wrong)
    assert all(max(each["differences"].values()) > parts.PRODUCT_LIMIT for each in wrong)


def test_what_one_gpu_cannot_show_is_listed(call, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(parts, "_started", lambda *_: [{"layout": "tp", "problems": ["x"], "differences": {"y": 0.1}}])
    found = {row.what: row.status for row in on_ranks(load("fp8_current"), call)}
    assert list(found.values()) == ["off", "off", "not available"]
    assert [row.status for row in on_ranks(load("nvfp4"), call)] == ["not available"] * 2


@pytest.mark.full
def test_ranks_are_processes_and_a_failure_is_an_error(call):
    with pytest.raises(RuntimeError, match="cuda"):  # this build of torch has none
        list(on_ranks(load("fp8_current"), call))
