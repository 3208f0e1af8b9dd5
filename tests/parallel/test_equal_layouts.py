"""Every data-parallel layout file trains to the same bits as one rank: losses, norms, gradients and final parameters.

The matrix is made from `conf/parallel/`: a new layout file is tested by existing (test_equal_pipelines.py,
test_model_parallel.py have the others).
"""

import pytest
from layout_matrix import DATA_PARALLEL, PRECISIONS, Case, cases_on, covering, degrees_of, steps_of
from traced_run import Trace, difference, traced_run

from lightning_llm.compose import compose_config
from lightning_llm.parallel.degrees import bitwise_problem, resolve_degrees

ALONE = [
    Case(layout, 1, 4, precision) for layout in DATA_PARALLEL if degrees_of(layout, 1) for precision in ("fp32", "bf16")
]
COVERING = [*ALONE, *covering(cases_on((2, 4), DATA_PARALLEL, PRECISIONS), strength=2)]
FULL = [case for case in covering(cases_on((2, 4, 8), DATA_PARALLEL, PRECISIONS), strength=3) if case not in COVERING]


@pytest.fixture(scope="module")
def words(small_run, tmp_path_factory):
    def run(layout: str, world: int, micro_batches: int, precision: str, *more: str) -> list[str]:
        return small_run(
            tmp_path_factory.mktemp("run"),
            f"parallel={layout}", f"trainer.devices={world}", f"precision={precision}", "precision.casts=eager",
            "data.micro_batch_size=1", f"data.global_batch_size={micro_batches}", "data.sequence_length=64",
            "model.hidden_size=64", "model.num_heads=1", "model.ffn_hidden_size=128", "model.num_layers=3",
            f"trainer.max_steps={steps_of(precision)}", "trainer.validate_every_steps=4", "checkpoint.every_steps=null",
            "optim.gradient_clip_norm=0.5", *more,
        )  # fmt: skip

    return run


@pytest.fixture(scope="module")
def alone(ranks, words):
    """Return the trace of a single rank, run once for each number of micro-batches and precision."""
    traces: dict[tuple[int, str], Trace] = {}

    def trace(micro_batches: int, precision: str) -> Trace:
        if (micro_batches, precision) not in traces:
            config = compose_config(words("single", 1, micro_batches, precision))
            traces[micro_batches, precision] = ranks(1).call(traced_run, config)
        return traces[micro_batches, precision]

    return trace


@pytest.mark.parametrize("case", [*COVERING, *(pytest.param(case, marks=pytest.mark.full) for case in FULL)], ids=str)
def test_a_layout_trains_to_the_bits_of_one_rank(case: Case, ranks, words, alone):
    checkpointing = f"parallel.activation_checkpoint={case.checkpointing}"
    config = compose_config(words(case.layout, case.world, case.micro_batches, case.precision, checkpointing))
    degrees = resolve_degrees(config.parallel, case.world)
    assert bitwise_problem(degrees, config.parallel.zero_stage, case.micro_batches // case.world) is None
    ours = ranks(case.world).call(traced_run, config)
    assert difference(ours, alone(case.micro_batches, case.precision)) is None
    norms = [line[3] for line in ours["curve"] if line[3] is not None]
    assert max(norms) > 0.5, "nothing was clipped"
