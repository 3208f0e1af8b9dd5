"""Base classes of every config group's schema."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class BrokenKeyError(Exception):
    """A rule read a key that has an invalid value, which is already reported; the rule is then skipped (`gather`)."""


class Group(BaseModel):
    """Base class of config groups: frozen, strictly typed (no "3" for 3), finite floats only, unknown keys rejected.

    Its schema is built on first use, when all kinds that it may contain are registered.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        defer_build=True,
    )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise BrokenKeyError for a declared field that is missing, as in the valid part of a config."""
            if name in type(self).model_fields:
                raise BrokenKeyError(name)
            return super().__getattr__(name)


LARGEST_INT = 2**31 - 1
"""Largest size or count: steps and micro-batches are hashed as 32-bit words, token ids and indices stored as such."""
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
"""Largest fp32 number, since training computes in fp32."""

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_INT)]
PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST_FLOAT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_INT)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST_FLOAT)]
RankCount = Annotated[int, Field(gt=0, le=2**20)]
ThreadCount = Annotated[int, Field(gt=0, le=1024)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _whole(value: Any) -> Any:
    """Return a whole float such as 200e6 as an integer. Raises ValueError if it is not whole."""
    if isinstance(value, str) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError("must be a whole number of tokens, such as 200000000 or 200e6.")
    return int(value) if isinstance(value, float) else value


MOST_TOKENS = 2**53
TokenCount = Annotated[int, BeforeValidator(_whole), Field(gt=0, le=MOST_TOKENS)]
"""A number of tokens; may be written as 200e6."""
