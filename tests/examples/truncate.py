from typing import ClassVar, Literal

from lightning_llm.config.schema.cast_kinds import ROUNDINGS, RoundingKind


@ROUNDINGS.register
class Truncate(RoundingKind):
    """Towards zero: the biased rounding that hardware without rounding logic has."""

    name: Literal["truncate"] = "truncate"
    meaning: ClassVar[str] = "towards zero"
    label: ClassVar[str] = "trunc"

    def whole(self, steps, fmt, noise):
        return steps.floor()
