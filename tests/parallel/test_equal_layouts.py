"""Every data-parallel layout file trains to the same bits as one rank: losses, norms, gradients and final parameters.

The matrix is made from `conf/parallel/`: a new layout file is tested by existing (test_equal_pipelines.py,
test_model_parallel.py have the others).
"""

import pytest

from tests.parallel.layout_matrix import (
    DATA_PARALLEL,
    PRECISIONS,
    WHOLE_STRENGTH,
    Case,
    cases_on,
    covering,
    degrees_of,
    layers_of,
    length_of,
)

ALONE = [
    Case(layout, 1, 4, ("fp32", "bf16")[number % 2])
    for number, layout in enumerate(layout for layout in DATA_PARALLEL if degrees_of(layout, 1))
]
OWN_WAYS = ["fp32", "bf16", "fp8_delayed", "nvfp4"]
"""Precisions that data parallelism can affect in different ways: by the history of scales, or by a tensor's scale and
the keys of its random bits. Other casts depend on one micro-batch only, as bf16's roundings do: `make test` covers two
block shapes of them, `make test-full` all.
"""
BLOCKS = ["fp8_subchannel", "mxfp8"]
EMULATED_UNDER = ("ddp", "zero3", "hsdp")
"""The layouts of emulated recipes in `make test`: zero1 and zero2 reduce amaxes over the same group as ddp."""
QUICK = [
    case
    for case in cases_on((2, 4), DATA_PARALLEL, OWN_WAYS)
    if (case.micro_batches <= 16 if case.precision in ("fp32", "bf16") else case.micro_batches <= 4)
    and (case.precision in ("fp32", "bf16") or case.layout in EMULATED_UNDER)
]
"""Four micro-batches on each of four ranks take an emulated recipe 15 CPU seconds."""
COVERING = [
    *(case for case in ALONE if case.layout in ("ddp", "zero3")),
    *covering(QUICK, strength=2, of_layout=True),
    *(Case("zero3", 2, 4, precision, "selective") for precision in BLOCKS),
]
FULL = [
    case
    for case in (*ALONE, *covering(cases_on((2, 4, 8), DATA_PARALLEL, PRECISIONS), WHOLE_STRENGTH))
    if case not in COVERING
]


@pytest.mark.parametrize("case", [*COVERING, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)], ids=str)
def test_a_layout_trains_to_the_bits_of_one_rank(case: Case, to_the_bits):
    to_the_bits(case, layers_of(case.precision), *length_of(case.precision))


HYBRIDS = [
    Case("zero3", 2, 4, "bf16", "selective"),
    pytest.param(Case("zero3", 2, 4, "fp8_delayed", "selective"), marks=pytest.mark.full),
    *(
        pytest.param(Case(layout, 4, 8, precision), marks=pytest.mark.full)
        for layout in DATA_PARALLEL
        for precision in ("bf16", "nvfp4")
    ),
]


@pytest.mark.parametrize("case", HYBRIDS, ids=str)
def test_a_hybrid_of_linear_and_softmax_attention_trains_to_the_bits_of_one_rank(case: Case, to_the_bits):
    layers = ["model.layers=[gla, gla, attention]", "data.document_mask=true"]
    to_the_bits(case, "model.num_layers=3", *layers, *length_of(case.precision))


@pytest.mark.full
@pytest.mark.parametrize("case", [Case("ddp", 2, 4, "fp8_delayed"), Case("pp", 2, 4, "mxfp4_sr")], ids=str)
def test_compiled_blocks_with_emulated_casts_train_to_the_bits_of_one_rank(case: Case, to_the_bits):
    to_the_bits(case, "parallel.compile=true", layers_of(case.precision), *length_of(case.precision))


@pytest.mark.parametrize("layout", ["zero3", pytest.param("zero1", marks=pytest.mark.full)])
def test_biases_of_quantised_linears_are_those_of_one_rank(layout, to_the_bits):
    """FSDP2 gathers them in the dtype of the computation, in which one rank adds them."""
    to_the_bits(Case(layout, 2, 4, "fp8_current"), "model.num_layers=3", "model.bias=true", *length_of("fp8_current"))
