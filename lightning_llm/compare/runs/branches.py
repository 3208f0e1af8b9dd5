"""Branches off a trunk in a comparison: what a verdict on them holds for, and what their replicates are.

Two branches off one checkpoint share all that came before, so their difference is that of a recipe switched on late.
What is repeated decides what the interval speaks of. Several trunks, each of a seed that its branches keep, are
replicates of the whole experiment: seeds as blocks, as for whole runs. Several seeds after one trunk repeat what
follows it (order of data, random bits), given that trunk: counted as replicates of trunks they would be
pseudoreplicates (S. H. Hurlbert, Ecological Monographs 54 (1984) 187-211), so trunks are then judged apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_llm.tracking.reading import Run

KEY = "branch_from"


@dataclass(frozen=True)
class Switch:
    """Where the branches of a verdict left their trunks: `steps` of `max_steps`, over `trunks` of them and `seeds`."""

    steps: tuple[int, ...]
    max_steps: tuple[int, ...]
    trunks: int
    seeds: int

    @property
    def words(self) -> str:
        """What the verdict holds for, as the rest of a sentence."""
        steps, last = (" or ".join(map(str, each)) for each in (self.steps, self.max_steps))
        if self.trunks > 1:
            over = f"over {self.trunks} trunks"
        else:
            over = f"after one trunk, over {self.seeds} seed{'s' * (self.seeds > 1)}"
        return f"holds for late switching only: from step {steps} of {last}, {over}"

    def as_data(self) -> dict[str, Any]:
        """Return what `compare.json` has of it."""
        return {
            "steps": list(self.steps),
            "max_steps": list(self.max_steps),
            "trunks": self.trunks,
            "seeds": self.seeds,
            "holds_for": self.words,
        }


def switch_of(runs: Sequence[Run]) -> Switch | None:
    """Return where `runs` were switched, None where none is a branch."""
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
    """Return the key of the start where it tells no recipe from another over `runs`: it is in each pair the same.

    That is where all branch off the same state, wherever it lies; or off several at one step, each of a seed that its
    branches keep, so that the seed of a pair says which, and none a branch of another's trunk.
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
    """Return the id of the whole run that the branch goes back to, over all branches between."""
    return run.branch.get("root_run_id") or run.branch.get("run_id") or run.branch.get("digest")


def trunks_are_replicates(runs: Sequence[Run]) -> bool:
    """Whether more seeds of `runs` would have to be more trunks."""
    return len({run.branch.get("digest") for run in runs}) > 1 and equivalent_starts(runs) == (KEY,)


def notes_on_branches(runs: Sequence[Run]) -> list[str]:
    """Return what to read beside verdicts on branches."""
    switch = switch_of(runs)
    if switch is None:
        return []
    notes = [
        "Branches share what came before their first step: a verdict on them says what a recipe costs that is switched "
        "on there, and nothing of the same recipe from the first step on, which may cost more."
    ]
    if trunks_are_replicates(runs):
        notes.append("Each seed here is a trunk: more seeds are more trunks, with their branches.")
    if switch.trunks == 1:
        notes.append(
            "All branch off one trunk: the interval is over what follows it (seeds: order of data, random bits), not "
            "over trunks. Trunks of other seeds, branch_from=TRUNK_A,TRUNK_B,..., would say whether it holds for them."
        )
    return notes
