"""Runs of single ranks, which all tests here are compared with."""

from collections.abc import Callable, Sequence

import pytest

from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.plan.degrees import bitwise_problem, resolve_degrees
from tests.parallel.layout_matrix import Case
from tests.parallel.traced_run import Trace, difference, unsaved_run


@pytest.fixture(scope="session")
def matrix_run(small_run, tmp_path_factory) -> Callable[..., Config]:
    """Return the config of a run of the matrix: `micro_batches` per step over all ranks, gradients clipped."""

    def compose(layout: str, world: int, micro_batches: int, precision: str, *more: str) -> Config:
        words = small_run(
            tmp_path_factory.mktemp("run"),
            f"parallel={layout}", f"trainer.devices={world}", f"precision={precision}", "precision.casts=eager",
            "data.micro_batch_size=1", f"data.global_batch_size={micro_batches}", "data.sequence_length=64",
            "model.hidden_size=64", "model.num_heads=1", "model.ffn_hidden_size=128",
            "data.validation.sequences=3",  # no multiple of any number of ranks
            "trainer.validate_every_steps=2", "checkpoint.every_steps=null", "optim.gradient_clip_norm=0.5", *more,
        )  # fmt: skip
        return compose_config(words)

    return compose


@pytest.fixture(scope="session")
def alone(ranks, matrix_run) -> Callable[..., Trace]:
    """Return the trace of a single rank, run once for each number of micro-batches, precision and further overrides."""
    traces: dict[tuple, Trace] = {}

    def trace(micro_batches: int, precision: str, *more: str) -> Trace:
        key = (micro_batches, precision, *more)
        if key not in traces:
            traces[key] = ranks(1).call(unsaved_run, matrix_run("single", 1, micro_batches, precision, *more))
        return traces[key]

    return trace


@pytest.fixture(scope="session")
def to_the_bits(ranks, matrix_run, alone) -> Callable[..., None]:
    """Return a function that asserts that a case trains to the bits of one rank, by curves, gradients and weights.

    `ours`: further overrides of the case, not of the single rank.
    """

    def check(case: Case, *more: str, ours: Sequence[str] = ()) -> None:
        own = [f"parallel.activation_checkpoint={case.checkpointing}", *ours]
        config = matrix_run(case.layout, case.world, case.micro_batches, case.precision, *more, *own)
        degrees = resolve_degrees(config.parallel, case.world)
        assert bitwise_problem(degrees, config.parallel.zero_stage, case.micro_batches // degrees.dp) is None
        found = ranks(case.world).call(unsaved_run, config)
        assert difference(found, alone(case.micro_batches, case.precision, *more)) is None
        norms = [line[3] for line in found["curve"] if line[3] is not None]
        assert max(norms) > 0.5, "nothing was clipped"

    return check
