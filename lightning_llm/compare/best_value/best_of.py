"""What `--best-of KEY` asks for, and what was chosen for one recipe."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class BestOf:
    """What is asked for: the `key` whose best value is chosen, and the seeds that choose; none: the lowest.

    `by_all`: every seed chooses, and judges as well, which the whole grid then makes up for (`tuned`).
    """

    key: str
    seeds: tuple[int, ...] = ()
    sweeps: tuple[Path, ...] = ()
    """Folders of the sweeps that are judged, one of which a longer grid would be added to."""
    by_all: bool = False


@dataclass(frozen=True)
class Choice:
    """What was chosen for one recipe; `losses`: their mean over the choosing seeds by value, infinite where one failed.

    `words` name the recipe. `value` is None where all failed, `lost_seeds` the judging seeds that failed at it;
    `plateau`: the range of values within the margin of the best by the mean over all seeds that have all values, which
    `best_over_all` seeds may be another value than those that chose took, at the grid's end, too.
    """

    words: str
    value: Any
    losses: dict[Any, float]
    lost_seeds: tuple[int, ...] = ()
    plateau: tuple[float, float] | None = None
    best_over_all: Any = None

    @property
    def at_the_edge(self) -> bool:
        """Whether the chosen value is the least or the greatest of several numbers: a better one may lie beyond."""
        return len(self.losses) > 1 and self.value in (min(self.losses), max(self.losses))

    def line(self, name: str) -> str:
        """Return the choice among values of `name` in words."""
        losses = ", ".join(
            f"{f'{loss:.4f}' if math.isfinite(loss) else 'diverged'} at {value:g}"
            for value, loss in sorted(self.losses.items())
        )
        if self.value is None:
            return f"{self.words}: no {name} can be chosen, all diverged ({losses}); it is not judged."
        edge = " It is the last of the grid." if self.at_the_edge else ""
        if self.plateau is not None:
            low, high = self.plateau
            flat = f"from {low:.3g} to {high:.3g}, a factor of {high / low:.3g}" if low else ""
            least = "" if self.best_over_all in (None, self.value) else f", {self.best_over_all:g},"
            edge += f" Over all seeds the loss is within the margin of its best{least} {flat}." if flat else ""
        seeds = f"seed{'s' if len(self.lost_seeds) > 1 else ''} {', '.join(map(str, self.lost_seeds))}"
        lost = f" At {seeds}, which chose nothing, it diverged." if self.lost_seeds else ""
        return f"{self.words}: best at {name}={self.value:g} (loss {losses}).{edge}{lost}"
