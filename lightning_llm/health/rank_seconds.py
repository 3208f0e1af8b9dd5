"""Figures of each rank's seconds over many steps: how long it computes, how evenly, and what it waits for."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_llm.health.stragglers import PARTS, WAIT

LISTED_RANKS = 32
"""How many ranks have figures in a record, of thousands: those that compute longest."""
DATA, COMPUTE = PARTS.index("data"), PARTS.index("compute")


class RankSeconds:
    """Adds up what `StragglerDetector.take` is given; `hosts`: the machine of each rank."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = list(hosts)
        self.steps = 0
        self._since: list[Any] = []
        self._sum = np.zeros((len(self.hosts), WAIT + 1))
        self._jitters: list[Any] = []

    def add(self, seconds: Any) -> None:
        """Take a step's seconds, [ranks, columns]."""
        self.steps += 1
        self._since.append(seconds)
        self._sum += seconds

    def since_last(self) -> dict[str, float]:
        """Return the figures of a record over the steps since the last, and begin anew."""
        seconds = np.stack(self._since)  # [steps, ranks, columns]
        self._since = []
        compute, jitter = _spread(seconds[:, :, COMPUTE])
        self._jitters.append(jitter)
        columns = {
            "rank_compute_seconds": compute,
            "rank_jitter": jitter,
            "rank_wait_seconds": seconds[:, :, WAIT].mean(axis=0),
            "rank_data_seconds": seconds[:, :, DATA].mean(axis=0),
        }
        listed = sorted(np.argsort(-compute)[:LISTED_RANKS].tolist())
        known = {name: values for name, values in columns.items() if not np.isnan(values).any()}
        return {f"{name}/{rank}": float(values[rank]) for name, values in known.items() for rank in listed}

    def of_all_steps(self) -> list[dict[str, Any]]:
        """Return each rank's totals, and the median of its jitter; of many, those that computed longest."""
        jitters = [*self._jitters, *([_spread(np.stack(self._since)[:, :, COMPUTE])[1]] if self._since else [])]
        jitter = np.median(np.stack(jitters), axis=0)
        listed = sorted(np.argsort(-self._sum[:, COMPUTE])[:LISTED_RANKS].tolist())
        names = {"data_seconds": DATA, "compute_seconds": COMPUTE, "wait_seconds": WAIT}
        return [
            {
                "rank": rank,
                "host": self.hosts[rank],
                "steps": self.steps,
                **{key: _known(self._sum[rank, column]) for key, column in names.items()},
                "jitter": float(jitter[rank]),
            }
            for rank in listed
        ]


def _spread(seconds: Any) -> tuple[Any, Any]:
    """Return the median over steps, and by how much of it the 95th percentile exceeds it: of each rank."""
    middle, high = np.percentile(seconds, (50, 95), axis=0)
    return middle, high / np.maximum(middle, 1e-12) - 1


def _known(seconds: float) -> float | None:
    return None if np.isnan(seconds) else round(float(seconds), 6)
