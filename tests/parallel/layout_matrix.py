"""The generated matrix: axes of a run, and few cases that cover every combination of a given number of values."""

import os
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.schema.run import ParallelConfig
from lightning_llm.plan.degrees import Degrees, resolve_degrees

FOLDER = Path(__file__).parents[2] / "conf" / "parallel"
NAMES = sorted({file.stem for file in FOLDER.glob("*.yaml")} - {"single"})


def layout_of(name: str) -> ParallelConfig:
    """Return the layout of a file by itself, which takes a tenth of composing a run with it."""
    tree: Any = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"), resolve=False)
    return ParallelConfig.model_validate(tree | {"compile": False})  # a reference to trainer.compile


CONFIGS = {name: layout_of(name) for name in NAMES}
STAGED = [name for name in NAMES if CONFIGS[name].pp != 1]
SHARED = [name for name in NAMES if (CONFIGS[name].tp, CONFIGS[name].cp) != (1, 1)]
PIPELINED = [name for name in STAGED if name not in SHARED]
CUT = [name for name in SHARED if name not in STAGED]
SHARDED_STAGES = [name for name in STAGED if name in SHARED]
DATA_PARALLEL = [name for name in NAMES if name not in STAGED and name not in SHARED]
PRECISIONS = ["fp32", "bf16", "fp8_current", "fp8_delayed", "fp8_subchannel", "mxfp8", "nvfp4", "mxfp4_sr"]
CHECKPOINTING = ["none", "full", "selective"]


@dataclass(frozen=True)
class Case:
    layout: str
    world: int
    micro_batches: int
    """Per step, over all ranks; the accumulation is this over the data-parallel ranks."""
    precision: str
    checkpointing: str = "none"

    def values(self) -> tuple[Any, ...]:
        """Return the combined dimensions."""
        return (
            self.layout,
            self.world,
            self.micro_batches // self.world,
            self.precision,
            self.checkpointing,
        )

    def __str__(self) -> str:
        return f"{self.layout}-{self.world}ranks-{self.micro_batches}mb-{self.precision}-{self.checkpointing}"


WHOLE_STRENGTH = int(os.environ.get("LAYOUT_STRENGTH", 2))
"""`make test-full` covers all combinations of this number of values; 3 takes hours."""
CLOSE_STEPS = 6 if "LAYOUT_STEPS" in os.environ else 1
"""Steps of runs that sum in another order than one rank, because their difference grows with the steps."""


def lasting(steps: int) -> list[str]:
    """Return the words of a run of so many steps, validated half way and at its end.

    The schedule lasts three at least: longer than its warm-up of two.
    """
    validated = f"trainer.validate_every_steps={(steps + 1) // 2}"
    return [f"trainer.max_steps={steps}", validated, f"schedule.total_steps={max(steps, 3)}"]


def length_of(precision: str) -> list[str]:
    """Return the words of how long a run is that must be equal: some steps in `make test-full`, here the fewest.

    The weights after one step, and their validation, show its gradients and its update. Delayed scales take another
    step, which uses them. What optimizers keep from step to step is compared in test_optimizers.py and
    test_resume_layouts.py, over four and six.
    """
    return lasting(int(os.environ.get("LAYOUT_STEPS", 2 if precision == "fp8_delayed" else 1)))


def layers_of(precision: str) -> str:
    """Return the override of the number of blocks of a data-parallel run: 3, so that FSDP2 gathers one block ahead.

    `make test` uses 2 for emulated casts: two blocks are enough to distinguish their keys and scales. A recipe that
    keeps the first and the last block unquantized needs three.
    """
    emulated = precision not in ("fp32", "bf16", "fp8_current")
    return f"model.num_layers={2 if emulated and 'LAYOUT_STEPS' not in os.environ else 3}"


def fewest_ranks(layout: str) -> int:
    """Return the fewest ranks that give every axis in the name of a layout that cuts weights or sequences two."""
    return 2 ** (1 + layout.count("_") + layout.count("hsdp"))


def degrees_of(layout: str, world: int) -> Degrees | None:
    """Return the degrees of a layout file on so many ranks, None where it does not fit them."""
    try:
        return resolve_degrees(CONFIGS[layout], world)
    except ConfigError:
        return None


def cases_on(worlds: tuple[int, ...], layouts: list[str], precisions: list[str]) -> list[Case]:
    """Return all cases; a rank computes 1, 2 or 4 micro-batches per step, in a pipeline times its stages."""
    places = [(layout, world, degrees_of(layout, world)) for layout in layouts for world in worlds]
    cells = product([place for place in places if place[2]], (1, 2, 4), precisions, CHECKPOINTING)
    return [
        Case(layout, world, degrees.dp * degrees.pp * micro_batches, *rest)
        for (layout, world, degrees), micro_batches, *rest in cells
    ]


def covering(cases: list[Any], strength: int, *, of_layout: bool = False) -> list[Any]:
    """Return few of `cases` that hold every combination of `strength` values that occurs, picked greedily.

    `of_layout`: only the combinations that contain the case's first value, its layout.
    """

    bits: dict[tuple[Any, ...], int] = {}  # of each combination one: sets of them are integers

    def combined(case: Any) -> int:
        found = combinations(enumerate(case.values()), strength)
        wanted = [each for each in found if not of_layout or each[0][0] == 0]
        return sum(1 << bits.setdefault(combination, len(bits)) for combination in wanted)

    held = [combined(case) for case in cases]
    wanted = (1 << len(bits)) - 1
    chosen = []
    while wanted:
        most = max(range(len(cases)), key=lambda number: (held[number] & wanted).bit_count())
        chosen.append(cases[most])
        wanted &= ~held[most]
    return chosen
