"""Scorers: what `prepare --score` makes of documents. Registered kinds, chosen by name.

A kind is a subclass of `ScorerConfig` in `lightning_llm/data/scoring/scorers.py`, or in an installed package.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from lightning_llm.base.errors import Problem
from lightning_llm.base.registry import Registry
from lightning_llm.config.schema.base import Group

Measure = Literal["quality", "diversity"]


class UnscorableError(Exception):
    """The documents at hand have no such score; why, in a few words."""


class ScorerConfig(Group):
    """What every scorer has, and what it must do."""

    measures: ClassVar[Measure]
    """What its numbers are taken for."""

    kind: str = Field(description="a registered scorer")

    def problems(self, key: str) -> Iterable[Problem]:
        """Return what keeps it from being run here, such as a library that is missing."""
        return ()

    def score(self, texts: Sequence[str]) -> tuple[Any, Any]:
        """Return float64 [documents] in [0, 1], and of a measure by clusters int32 [documents], each one's; else None.

        A function of the texts alone.

        Raises:
            UnscorableError: these texts cannot be scored; whatever else it raises is taken for its own fault.
        """
        raise NotImplementedError


SCORERS: Registry[ScorerConfig] = Registry("scorer", "lightning_llm.data.scoring.scorers")
