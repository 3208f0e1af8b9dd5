"""Base classes of every config group's schema."""

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class BrokenKeyError(Exception):
    """A rule read a key whose value is wrong, which is reported already: see `config.schema.strict`."""


class Group(BaseModel):
    """One config group: frozen, typed strictly (no "3" for 3), finite, and any key it does not name is an error.

    Its schema is built when the first is read, when all kinds that it may hold are registered.
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
            """Called for what is not there. A declared field is always there, but in a config's sound part."""
            if name in type(self).model_fields:
                raise BrokenKeyError(name)
            return super().__getattr__(name)


LARGEST_INT = 2**31 - 1
"""Of a size or a count: steps and micro-batches are hashed as 32-bit words, token ids and indices kept as such."""
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
"""Of fp32, in which training computes."""

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_INT)]
PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST_FLOAT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_INT)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=LARGEST_FLOAT)]
RankCount = Annotated[int, Field(gt=0, le=2**20)]
ThreadCount = Annotated[int, Field(gt=0, le=1024)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _whole(value: Any) -> Any:
    """Return 200e6 as the number of tokens that it is written for. Raises ValueError for what is no whole number."""
    if isinstance(value, str) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(f"is {value!r}, must be a whole number of tokens, such as 200000000 or 200e6.")
    return int(value) if isinstance(value, float) else value


MOST_TOKENS = 2**53
TokenCount = Annotated[int, BeforeValidator(_whole), Field(gt=0, le=MOST_TOKENS)]
"""A number of tokens, which may be written as 200e6."""
