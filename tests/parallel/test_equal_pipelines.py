"""Every pipelined layout file trains to the same bits as one rank alone, and near them where bits cannot be equal.

A stage computes what a single rank computes of its layers, and its backward passes come in the order of micro-batches,
so that the tree of gradient sums fits. Only a tied embedding's gradient, whose halves are summed apart, is close.
Emulated recipes run few steps of the smallest model that their rotations fit.
"""

import os

import pytest
import torch
from layout_matrix import PIPELINED, PRECISIONS, Case, cases_on, covering, degrees_of
from traced_run import difference, traced_run

LAYERS = 5
"""Uneven over two and four stages."""
TOLERANCE = 2e-6
CUT = [
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.head_dim=64",
    "model.hidden_size=128",
    "data.sequence_length=128",
]
"""Two ranks can share it: whole heads, and whole rotations of 64."""
INTERLEAVED = ["parallel.schedule=interleaved_1f1b", "parallel.virtual_stages=2"]
SOME = ["bf16", "mxfp4_sr"]
"""In `make test`; test_resume_layouts.py has delayed scaling through pipelines, to the bits of one rank, too."""


def stages_fit(case: Case) -> bool:
    degrees = degrees_of(case.layout, case.world)
    return degrees is not None and (degrees.pp <= 2 or not case.layout.endswith("interleaved"))


MOST = {"bf16": 8}
"""Micro-batches per step in `make test`; 4 of emulated recipes."""
QUICK = [
    case
    for case in cases_on((2, 4), PIPELINED, SOME)
    if stages_fit(case) and case.micro_batches <= MOST.get(case.precision, 4)
]
COVERING = covering(QUICK, strength=2)
ALL = [case for case in cases_on((2, 4, 8), PIPELINED, PRECISIONS) if stages_fit(case)]
FULL = [case for case in covering(ALL, strength=3) if case not in COVERING]


SHAPE = [f"model.num_layers={LAYERS}", f"trainer.max_steps={os.environ.get('LAYOUT_STEPS', 6)}"]
"""20 steps in `make test-full`."""
CLOSE = [f"model.num_layers={LAYERS}", "trainer.max_steps=6"]
"""Where sums are in another order, which grows with the steps."""


@pytest.mark.parametrize("case", [*COVERING, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)], ids=str)
def test_a_pipeline_trains_to_the_bits_of_one_rank(case: Case, to_the_bits):
    to_the_bits(case, *SHAPE)


@pytest.mark.parametrize(
    ("layout", "world", "precision"),
    [
        ("pp", 2, "fp32"),
        pytest.param("fsdp_pp", 4, "fp32", marks=pytest.mark.full),
        pytest.param("pp", 4, "bf16", marks=pytest.mark.full),
    ],
)
def test_a_tied_embedding_is_close(layout, world, precision, ranks, matrix_run, alone):
    """`of_all_stages` has compared the copies of first and last stage, gradients and parameters, bit for bit."""
    tied = [*CLOSE, "model.tie_embeddings=true"]
    ours = ranks(world).call(traced_run, matrix_run(layout, world, 8, precision, *tied))
    single = alone(8, precision, *tied)
    tolerance = TOLERANCE if precision == "fp32" else 1e-3
    for one, other in zip(ours["curve"], single["curve"], strict=True):
        for value, expected in zip(one[2:], other[2:], strict=True):
            assert value == (None if expected is None else pytest.approx(expected, rel=tolerance))
    if precision == "fp32":
        for step, expected in enumerate(single["gradients"]):
            for name, gradient in expected.items():
                torch.testing.assert_close(ours["gradients"][step][name], gradient, rtol=1e-5, atol=1e-7)


PLACES = [
    ("pp", 2, "parallel.schedule=gpipe"),
    pytest.param("zero1", 4, "parallel.pp=2", marks=pytest.mark.full),
    pytest.param("zero3", 4, "parallel.pp=2", marks=pytest.mark.full),
    pytest.param("hsdp", 8, "parallel.pp=2", marks=pytest.mark.full),
    pytest.param("pp", 2, "parallel.compile=true", marks=pytest.mark.full),
    pytest.param("pp_interleaved", 2, "parallel.compile=true", marks=pytest.mark.full),
    pytest.param("fsdp_pp", 4, "parallel.compile=true", marks=pytest.mark.full),
    pytest.param("fsdp_pp", 4, "parallel.activation_checkpoint=full", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "world", "key"), PLACES)
def test_other_points_of_the_same_keys_are_equal(layout, world, key, ranks, matrix_run, alone):
    compiled = ["parallel.compile=true"] if "compile" in key else []
    ours = ranks(world).call(traced_run, matrix_run(layout, world, 8, "fp32", *SHAPE, key))
    assert difference(ours, alone(8, "fp32", *SHAPE, *compiled)) is None


def test_documents_are_masked_on_every_stage(ranks, matrix_run, alone):
    masked = [*SHAPE, "data.document_mask=true"]
    ours = ranks(2).call(traced_run, matrix_run("pp_interleaved", 2, 4, "fp32", *masked))
    assert difference(ours, alone(4, "fp32", *masked)) is None
    assert difference(alone(4, "fp32", *masked), alone(4, "fp32", *SHAPE)) is not None


@pytest.mark.parametrize(
    ("layout", "world", "precision", "more"),
    [
        ("pp_tp", 4, "fp32", []),
        pytest.param(
            "pp_tp", 4, "fp32", ["parallel.sequence_parallel=false", "parallel.schedule=gpipe"], marks=pytest.mark.full
        ),
        pytest.param("pp_tp", 4, "fp32", ["parallel.compile=true"], marks=pytest.mark.full),
        pytest.param("pp_tp", 4, "fp32", ["parallel.activation_checkpoint=full"], marks=pytest.mark.full),
        pytest.param("pp_tp", 4, "mxfp4_sr", ["parallel.activation_checkpoint=full"], marks=pytest.mark.full),
        pytest.param("pp_tp", 4, "bf16", ["model.tie_embeddings=true"], marks=pytest.mark.full),
        pytest.param("pp_tp", 4, "fp8_delayed", [], marks=pytest.mark.full),
        pytest.param("pp_tp", 4, "fp32", ["model.tie_embeddings=true", *INTERLEAVED], marks=pytest.mark.full),
        pytest.param("fsdp_pp_tp", 8, "fp32", [], marks=pytest.mark.full),
        pytest.param("fsdp_pp_tp", 8, "fp32", ["model.tie_embeddings=true", *INTERLEAVED], marks=pytest.mark.full),
        pytest.param("fsdp_pp_tp", 8, "bf16", ["parallel.zero_stage=3"], marks=pytest.mark.full),
        pytest.param("fsdp_pp_tp", 8, "nvfp4", [], marks=pytest.mark.full),
    ],
)
def test_pipelines_of_tensor_parallel_stages_are_close(layout, world, precision, more, ranks, matrix_run, alone):
    """Tensor parallelism changes the order of sums within a micro-batch; a cast then may fall the other way."""
    casts = [] if precision in ("fp32", "bf16") else ["precision.compute_dtype=fp32"]  # differences are casts' alone
    model = [*(word for word in more if word.startswith("model.")), *CUT, *casts]
    config = matrix_run(layout, world, 4, precision, *CLOSE, *more, *CUT, *casts)
    ours, single = ranks(world).call(traced_run, config), alone(4, precision, *CLOSE, *model)
    limits = {"fp32": (TOLERANCE, 1e-5, 1e-5), "bf16": (2e-4, 5e-3, 1e-1)}
    loss, norm, weight = limits.get(precision, (2e-4, 1e-3, 2e-2))
    for one, other in zip(ours["curve"], single["curve"], strict=True):
        assert one[2] == approximately(other[2], loss)
        assert one[3] == approximately(other[3], norm)
        assert one[5:] == tuple(approximately(value, loss) for value in other[5:])
    for step, expected in enumerate(single["gradients"]):
        for name, gradient in expected.items():
            error = (ours["gradients"][step][name] - gradient).norm()  # delayed scales start at 1, some gradients at 0
            assert error <= gradient.norm() * (1e-5 if precision == "fp32" else 5e-2), (step, name)
    for name, parameter in single["parameters"].items():
        assert (ours["parameters"][name] - parameter).norm() <= parameter.norm() * weight, name


def approximately(value: float | None, tolerance: float) -> object:
    return None if value is None else pytest.approx(value, rel=tolerance)
