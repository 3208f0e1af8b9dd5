"""Compiled casts give eager's bits: one by one, of a rank's part of a tensor, and through a run of kept kernels.

All that compiles is here: a file is one worker's, which pays for loading Inductor and for a kernel but once.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.divisibility import CONTRACTION
from lightning_llm.precision.cast import inductor, kernel_cache
from lightning_llm.precision.conformance import run_conformance
from tests.parallel.cut_operands import degrees_of, differing, words_of
from tests.precision.recipes import CASTS, DISTINCT
from tests.run_metrics import read_metrics

pytestmark = pytest.mark.skipif(inductor.no_compiler("cpu") is not None, reason="no C++ compiler")
VECTORS = Path(__file__).parent / "vectors"
SHAPE = [
    "model.hidden_size=128", "model.num_heads=2", "model.num_kv_heads=1", "model.ffn_hidden_size=192",
    "model.num_layers=3", "optim.learning_rate=3e-3", "trainer.max_steps=3", "schedule.total_steps=3",
    "trainer.validate_every_steps=null", "checkpoint.every_steps=null",
]  # fmt: skip


def compare_with_eager(cast: CastConfig, axis: int, shapes: list[tuple[int, int]]) -> None:
    for rows, columns in shapes:
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
        x.view(-1)[:4] = torch.tensor([0.0, 1e-38, float("nan"), -3e38])
        if cast.block != "tensor":  # it would decide the tensor's scale
            x.view(-1)[-1] = float("inf")
        key, delayed = torch.tensor(1234), torch.tensor(7.5)
        eager = inductor.operand(x, cast, axis, "eager", key=key, delayed=delayed)
        made = inductor.operand(x, cast, axis, "compiled", key=key, delayed=delayed)
        for a, b in zip((*eager[:3], *(eager.blocks or ())), (*made[:3], *(made.blocks or ())), strict=True):
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                assert torch.equal(a.nan_to_num(nan=-1.5), b.nan_to_num(nan=-1.5))
            else:
                assert a == b


def forget_compiled() -> None:
    """Forget what this process has compiled or loaded, as another does not know of it."""
    for found in (inductor.why_not, inductor.tensor_amax, inductor._cast_function, inductor.cast_by):
        found.cache_clear()


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["fp8_delayed", pytest.param("mxfp4_sr", marks=pytest.mark.full)])
def test_compiled_casts_train_to_eagers_bits(recipe, small_run, tmp_path, capsys):
    """By kernels that `warm` has compiled, all of them."""
    words = small_run(tmp_path, *SHAPE, f"precision={recipe}", "precision.casts=compiled")
    others = [each for each in words if not each.startswith("precision")]
    forget_compiled()
    assert main(["warm", f"precision={recipe},bf16", *others]) == 0
    first, second, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{recipe}  \d+ kernels compiled and \d+ loaded in [\d.]+ s; ready after [\d.]+ s", first)
    assert (second.split(), last) == (["bf16", "casts", "nothing"], f"cached in {kernel_cache.folder()}")
    forget_compiled()
    assert main(["train", *words]) == 0
    out = capsys.readouterr().out
    assert "emulated, compiled (precision.casts=compiled)" in out
    assert re.findall(r"(\d+) kernels compiled and (\d+) loaded", out)[0][0] == "0"
    assert out.count("kernels compiled") == 1
    eager = small_run(tmp_path / "eager", *SHAPE, f"precision={recipe}", "precision.casts=eager")
    assert main(["train", *eager]) == 0
    seen = []
    for run in (tmp_path / "eager" / "run", tmp_path / "run"):
        seen.append([(each["loss"], each["grad_norm"]) for each in read_metrics(run) if "loss" in each])
    assert len(seen[0]) == 3
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    ("which", "axis", "shapes"),
    [
        pytest.param("mxfp8:fprop.x", 1, [(64, 128), (96, 256)], marks=pytest.mark.full),
        ("fp8_delayed:dgrad.dy", 1, [(37, 96)]),
        pytest.param("fp8_current:dgrad.dy", 1, [(37, 96)], marks=pytest.mark.full),
        pytest.param("fp8_subchannel:dgrad.w", 0, [(512, 192), (192, 192)], marks=pytest.mark.full),
    ],
)
def test_compiled_casts_give_eagers_bits(which, axis, shapes):
    compare_with_eager(CASTS[which], axis, shapes)


@pytest.mark.full
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("cast", DISTINCT, ids=lambda cast: DISTINCT.get(cast, ""))
def test_every_compiled_cast_gives_eagers_bits(cast, axis):
    compare_with_eager(cast, axis, [(64, 128), (128, 256), (37, 51)])


@pytest.mark.full
def test_special_values_pass_compiled(tmp_path):
    """The folder has two cases of the recorded vectors, Inf and NaN, and the arrays of all."""
    manifest = json.loads((VECTORS / "manifest.json").read_text())
    manifest["cases"] = [case for case in manifest["cases"] if case["name"].startswith("mxfp8te_e4m3_fp32_special")]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    for name in {case["file"] for case in manifest["cases"]}:
        (tmp_path / name).symlink_to(VECTORS / name)
    verdicts = run_conformance(tmp_path, compiled=True)
    assert [(verdict.passed, verdict.errors) for verdict in verdicts] == [(True, ())] * 2


@pytest.mark.full
def test_every_case_passes_compiled():
    verdicts = run_conformance(VECTORS, compiled=True)
    assert [(verdict.case, verdict.errors) for verdict in verdicts if not verdict.passed] == []
    assert len(verdicts) == 266


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "slots"), [([3], ["dgrad.dy"]), (range(4), list(CONTRACTION))])
def test_compiled_operands_are_the_parts_of_one_process(ranks, slots, monkeypatch):
    """Every rank's in turn, in one process: no slot of this recipe asks the other ranks for an amax.

    The last rank's part begins within the tensor along both its axes, which moves the random bits.
    """
    monkeypatch.setattr(Layout, "group", lambda layout, axis: axis)
    config = compose_config(words_of("mxfp4_sr"))
    for rank in ranks:
        layout = Layout(config.parallel, degrees_of(config), rank)
        assert differing(config, layout, "logical", "compiled", slots) == []
