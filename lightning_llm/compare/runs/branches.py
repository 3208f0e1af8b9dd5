"""Branches off a parent run in a comparison: the scope of a verdict on them, and their replicates.

Two branches off one checkpoint share everything before it, so their difference is the effect of switching a recipe on
late. The replicates determine the meaning of the interval. Several parent runs, each of a seed that its branches keep,
are replicates of the whole experiment: seeds as blocks, as for whole runs. Several seeds after one parent run repeat
only the part after it (order of data, random bits). Counted as replicates of parent runs they would be pseudoreplicates
(S. H. Hurlbert, Ecological Monographs 54 (1984) 187-211), so each parent run is then judged separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_llm.tracking.reading import Run

KEY = "branch_from"


@dataclass(frozen=True)
class Switch:
    """Branching steps of a verdict: distinct `steps` and `max_steps`; numbers of parent runs (`trunks`) and `seeds`."""

    steps: tuple[int, ...]
    max_steps: tuple[int, ...]
    trunks: int
    seeds: int

    @property
    def words(self) -> str:
        """The scope of the verdict, as the end of a sentence."""
        steps, last = (" or ".join(map(str, each)) for each in (self.steps, self.max_steps))
        if self.trunks > 1:
            over = f"over {self.trunks} parent runs"
        else:
            over = f"after one parent run, over {self.seeds} seed{'s' * (self.seeds > 1)}"
        return f"holds for late switching only: from step {steps} of {last}, {over}"

    def as_data(self) -> dict[str, Any]:
        """Return the entry "late_switching" of `compare.json`."""
        return {
            "steps": list(self.steps),
            "max_steps": list(self.max_steps),
            "trunks": self.trunks,
            "seeds": self.seeds,
            "holds_for": self.words,
        }


def switch_of(runs: Sequence[Run]) -> Switch | None:
    """Return the branching steps of the branches in `runs`, with their replicates; None if no run is a branch."""
    branches = [run for run in runs if run.branch]
    if not branches:
        return None
    return Switch(
        tuple(sorted({run.branch_step for run in branches})),
        tuple(sorted({int(run.config.get("trainer.max_steps") or 0) for run in branches})),
        len({_root(run) for run in branches}),
        len({run.seed for run in branches}),
    )


def equivalent_starts(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return the key of the start (`branch_from`) if it does not distinguish recipes over `runs`, else nothing.

    That holds if all branch off the same state, wherever it is stored. It also holds if they branch off several parent
    runs at one step, each with a seed that its branches keep (so the seed identifies it), and none is a branch of
    another's parent run.
    """
    if not runs or not all(run.branch for run in runs):
        return ()
    states = {run.branch.get("digest") for run in runs}
    if len(states) == 1:
        return (KEY,)
    kept = all(run.branch.get("seed") == run.seed for run in runs)
    trunks = {run.seed: run.branch.get("digest") for run in runs}
    one_each = all(run.branch.get("digest") == trunks[run.seed] for run in runs)
    apart = len({_root(run) for run in runs}) == len(states)
    return (KEY,) if kept and one_each and apart and len({run.branch_step for run in runs}) == 1 else ()


def _root(run: Run) -> Any:
    """Return the id of the whole run at the root of the branch, through all branches between."""
    return run.branch.get("root_run_id") or run.branch.get("run_id") or run.branch.get("digest")


def parent_runs_are_replicates(runs: Sequence[Run]) -> bool:
    """Return whether more seeds of `runs` require more parent runs."""
    return len({run.branch.get("digest") for run in runs}) > 1 and equivalent_starts(runs) == (KEY,)


def notes_on_branches(runs: Sequence[Run]) -> list[str]:
    """Return the notes on verdicts over branches."""
    switch = switch_of(runs)
    if switch is None:
        return []
    notes = [
        "Branches share everything before their first step: a verdict on them is about a recipe that is switched on "
        "there. The same recipe from the first step on may cost more."
    ]
    if parent_runs_are_replicates(runs):
        notes.append("Each seed here is a parent run: more seeds require more parent runs with their branches.")
    if switch.trunks == 1:
        notes.append(
            "All branch off one parent run: the interval covers the part after it (seeds: order of data, random bits), "
            "not parent runs. To include those, branch off several: branch_from=PARENT_A,PARENT_B,..."
        )
    return notes
