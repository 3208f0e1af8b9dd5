"""What every config group's schema is made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Group(BaseModel):
    """One config group: frozen, typed strictly (no "3" for 3), and any key it does not name is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
