"""Every pipelined layout file trains to the same bits as one rank alone, and near them where bits cannot be equal.

A stage runs the same computation for its layers as a single rank, and its backward passes run in the order of
micro-batches, which the tree of gradient sums needs. Only a tied embedding's gradient, with separately summed halves,
is just close. Emulated recipes run few steps of the smallest model that their rotations fit.
"""

import pytest

from tests.parallel.curve_limits import exceeded, limits_of, off
from tests.parallel.layout_matrix import (
    CLOSE_STEPS,
    PIPELINED,
    PRECISIONS,
    SHARDED_STAGES,
    WHOLE_STRENGTH,
    Case,
    cases_on,
    covering,
    degrees_of,
    fewest_ranks,
    lasting,
    length_of,
)
from tests.parallel.nudged_run import NUDGES, SENSITIVITY, nudged_run
from tests.parallel.traced_run import difference, unsaved_run

LAYERS = 5
"""Uneven over four stages."""
SHARED = [
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


def stages_of(layout: str, world: int) -> int:
    """Return the stages of a layout file on so many ranks, 0 where it does not fit them."""
    degrees = degrees_of(layout, world)
    return 0 if degrees is None else degrees.pp * (2 if layout.endswith("interleaved") else 1)


def stages_fit(case: Case) -> bool:
    return 0 < stages_of(case.layout, case.world) <= LAYERS


def layers_over(stages: int) -> str:
    """Return the word of the fewest blocks that are uneven over so many stages."""
    return f"model.num_layers={3 if stages == 2 else LAYERS}"


MOST = {"bf16": 8}
"""Micro-batches per step in `make test`; 4 of emulated recipes."""
QUICK = [
    case
    for case in cases_on((2, 4), PIPELINED, SOME)
    if stages_fit(case) and case.micro_batches <= MOST.get(case.precision, 4)
]
COVERING = covering(QUICK, strength=2, of_layout=True)
ALL = [case for case in cases_on((2, 4, 8), PIPELINED, PRECISIONS) if stages_fit(case)]
FULL = [case for case in covering(ALL, WHOLE_STRENGTH) if case not in COVERING]


SHAPE = [f"model.num_layers={LAYERS}", *length_of("mxfp4_sr")]
CLOSE = [f"model.num_layers={LAYERS}", *lasting(CLOSE_STEPS)]


@pytest.mark.parametrize("case", [*COVERING, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)], ids=str)
def test_a_pipeline_trains_to_the_bits_of_one_rank(case: Case, to_the_bits):
    to_the_bits(case, *SHAPE, layers_over(stages_of(case.layout, case.world)))


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
    tied = [*CLOSE, layers_over(stages_of(layout, world)), "model.tie_embeddings=true"]
    ours = ranks(world).call(unsaved_run, matrix_run(layout, world, 8, precision, *tied))
    single = alone(8, precision, *tied)
    assert exceeded(off(ours, single), limits_of(precision)) == []


PLACES = [
    ("pp", 2, "parallel.schedule=gpipe"),
    pytest.param("zero1", 4, "parallel.pp=2", marks=pytest.mark.full),
    pytest.param("zero3", 4, "parallel.pp=2", marks=pytest.mark.full),
    pytest.param("hsdp", 8, "parallel.pp=2", marks=pytest.mark.full),
    pytest.param("pp", 2, "parallel.compile=true", marks=pytest.mark.full),
    pytest.param("pp_interleaved", 2, "parallel.compile=true", marks=pytest.mark.full),
    pytest.param("fsdp_pp", 4, "parallel.compile=true", marks=pytest.mark.full),
    pytest.param("ddp_pp", 4, "parallel.compile=true", marks=pytest.mark.full),
    pytest.param("pp", 2, "parallel.schedule=gpipe parallel.compile=true", marks=pytest.mark.full),
    pytest.param("fsdp_pp", 4, "parallel.activation_checkpoint=full", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "world", "keys"), PLACES)
def test_other_points_of_the_same_keys_are_equal(layout, world, keys, ranks, matrix_run, alone):
    compiled = ["parallel.compile=true"] if "compile" in keys else []
    shape = [*SHAPE, layers_over(4 if "interleaved" in layout else 2)]
    ours = ranks(world).call(unsaved_run, matrix_run(layout, world, 8, "fp32", *shape, *keys.split()))
    assert difference(ours, alone(8, "fp32", *shape, *compiled)) is None


def test_documents_are_masked_on_every_stage(ranks, matrix_run, alone):
    """Of attention, and the states of linear attention begin anew."""
    masked = [*SHAPE, "data.document_mask=true", "model.layers=[attention, gla]"]
    ours = ranks(2).call(unsaved_run, matrix_run("pp_interleaved", 2, 4, "fp32", *masked))
    assert difference(ours, alone(4, "fp32", *masked)) is None
    assert difference(alone(4, "fp32", *masked), alone(4, "fp32", *masked, "data.document_mask=false")) is not None


TIED, NATIVE = "model.tie_embeddings=true", "parallel.reduction=native"
RECOMPUTED, COMPILED = "parallel.activation_checkpoint=full", "parallel.compile=true"
CLOSE_CASES = [
    # Made from `conf/parallel/`: a new layout file with pp and tp is tested by existing.
    *((layout, fewest_ranks(layout), precision, []) for layout in SHARDED_STAGES for precision in ("fp32", "nvfp4")),
    ("pp_tp", 4, "fp32", ["parallel.sequence_parallel=false", "parallel.schedule=gpipe"]),
    ("pp_tp", 4, "fp32", [COMPILED]),
    ("pp_tp", 4, "fp32", [RECOMPUTED]),
    ("pp_tp", 4, "mxfp4_sr", [RECOMPUTED]),
    ("pp_tp", 4, "bf16", [TIED]),
    ("pp_tp", 4, "fp8_delayed", []),
    ("pp_tp", 4, "fp32", [TIED, *INTERLEAVED]),
    ("pp_tp", 8, "fp32", [TIED, NATIVE, "parallel.dp_replicate=2", "parallel.sequence_parallel=false"]),
    ("fsdp_pp_tp", 8, "fp32", [TIED, *INTERLEAVED]),
    ("fsdp_pp_tp", 8, "fp32", [NATIVE, RECOMPUTED, "parallel.zero_stage=1", *INTERLEAVED]),
    ("fsdp_pp_tp", 8, "fp32", [COMPILED]),
    ("fsdp_pp_tp", 8, "bf16", ["parallel.zero_stage=3"]),
]
ON_FOUR = [("fsdp_pp_tp", 4, "fp32", []), ("fsdp_pp_tp", 4, "nvfp4", [])]
"""One rank to shard over: fsdp_pp and fsdp_tp have two, as `fewest_ranks` has."""
IN_MAKE_TEST = [("pp_tp", 4, "fp32", []), ("fsdp_pp_tp", 4, "fp32", [])]


@pytest.mark.parametrize(
    ("layout", "world", "precision", "more"),
    [
        case if case in IN_MAKE_TEST else pytest.param(*case, marks=pytest.mark.full)
        for case in (*CLOSE_CASES, *ON_FOUR)
    ],
)
def test_pipelines_of_tensor_parallel_stages_are_close(layout, world, precision, more, ranks, matrix_run, alone):
    """Tensor parallelism changes the order of sums within a micro-batch; a cast then may fall the other way."""
    casts = [] if precision in ("fp32", "bf16") else ["precision.compute_dtype=fp32"]  # differences are casts' alone
    model = [*(word for word in more if word.startswith("model.")), *SHARED, *casts]
    run = CLOSE if any("stages" in word for word in more) else [*CLOSE, "model.num_layers=3"]  # uneven over two stages
    ours = ranks(world).call(unsaved_run, matrix_run(layout, world, 4, precision, *run, *more, *SHARED, *casts))
    single, limits = alone(4, precision, *run, *model), limits_of(precision)
    if exceeded(off(ours, single), limits) and casts:
        words = ("single", 1, 4, precision, *run, *model)
        nudged = [ranks(1).call(nudged_run, matrix_run(*words), seed) for seed in NUDGES]
        limits = limits.widened(SENSITIVITY, [off(each, single) for each in nudged])
    assert exceeded(off(ours, single), limits) == []
