"""The figures of a run's first steps, as they were measured. Imports no torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StepFigures:
    """What one step gave, the same on every rank. Norms are those before clipping.

    `loss`, `grad_norm`: fp32 numbers. `gradient_norms`: fp64, by parameter names that no layout changes, in the order
    of the forward pass, the loss scale divided out.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    gradient_norms: dict[str, float]
    loss_scale: float = 1.0


@dataclass(frozen=True)
class Measured:
    """The first steps, and where their numbers come from (`tracking.provenance.origin_of`); the same on every rank."""

    figures: list[StepFigures]
    origin: dict[str, Any]

    def as_data(self) -> dict[str, Any]:
        """Return it for JSON as Python writes it, from process to process."""
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "Measured":
        """Return what `as_data` gave."""
        return cls([StepFigures(**each) for each in data["figures"]], dict(data["origin"]))
