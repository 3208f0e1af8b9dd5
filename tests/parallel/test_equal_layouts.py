"""Every data-parallel layout file trains to the same bits as one rank alone: losses, norms, gradients and final parameters.

The matrix is made from `conf/parallel/`: a new layout file is tested by existing.
"""

import os
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path

import pytest
from traced_run import Trace, difference, traced_run

from lightning_llm.compose import compose_config
from lightning_llm.errors import ConfigError
from lightning_llm.parallel.degrees import bitwise_problem, resolve_degrees

PRECISIONS = ["fp32", "bf16", "fp8_current", "fp8_delayed", "fp8_subchannel", "mxfp8", "nvfp4", "mxfp4_sr"]
CHECKPOINTING = ["none", "full", "selective"]


@dataclass(frozen=True)
class Case:
    layout: str
    world: int
    micro_batches: int
    """Per step, over all ranks; the accumulation is this over `world`."""
    precision: str
    checkpointing: str = "none"

    def __str__(self) -> str:
        return f"{self.layout}-{self.world}ranks-{self.micro_batches}mb-{self.precision}-{self.checkpointing}"


def steps_of(precision: str) -> int:
    """Return how long a run is: emulated casts run eagerly here, some ten times slower than bf16."""
    return 20 if precision in ("fp32", "bf16") or os.environ.get("LAYOUT_STEPS") == "20" else 8


FILES = sorted({file.stem for file in (Path(__file__).parents[2] / "conf" / "parallel").glob("*.yaml")} - {"single"})
CONFIGS = {layout: compose_config([f"parallel={layout}"]).parallel for layout in FILES}
LAYOUTS = [layout for layout, config in CONFIGS.items() if (config.tp, config.cp, config.pp) == (1, 1, 1)]
"""Data-parallel ones; others change the order of sums within a micro-batch (test_model_parallel.py)."""


def fits(layout: str, world: int) -> bool:
    try:
        resolve_degrees(CONFIGS[layout], world)
    except ConfigError:
        return False
    return True


def cases_on(*worlds: int) -> list[Case]:
    places = [(layout, world) for layout in LAYOUTS for world in worlds if fits(layout, world)]
    cells = product(places, (1, 2, 4), PRECISIONS, CHECKPOINTING)
    return [Case(layout, world, world * turns, *rest) for (layout, world), turns, *rest in cells]


def covering(cases: list[Case], strength: int) -> list[Case]:
    """Return few of `cases` that hold every combination of `strength` values that occurs, picked greedily."""

    def combined(case: Case) -> set:
        values = (case.layout, case.world, case.micro_batches // case.world, case.precision, case.checkpointing)
        return set(combinations(enumerate(values), strength))

    open_cases = [(case, combined(case)) for case in cases]
    wanted = set().union(*(values for _, values in open_cases))
    chosen = []
    while wanted:
        case, values = max(open_cases, key=lambda each: len(each[1] & wanted))
        chosen.append(case)
        wanted -= values
    return chosen


ALONE = [Case(layout, 1, 4, precision) for layout in LAYOUTS if fits(layout, 1) for precision in ("fp32", "bf16")]
COVERING = [*ALONE, *covering(cases_on(2, 4), strength=2)]
FULL = [case for case in covering(cases_on(2, 4, 8), strength=3) if case not in COVERING]


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
