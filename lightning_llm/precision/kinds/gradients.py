"""Built-in gradient rules of casts. Imports torch only to compute."""

from typing import TYPE_CHECKING, ClassVar, Literal

from lightning_llm.config.schema.cast_kinds import GRADIENTS, GradientKind
from lightning_llm.config.schema.number_formats import NumberFormat

if TYPE_CHECKING:
    from torch import Tensor


@GRADIENTS.register
class StraightThrough(GradientKind):
    """The derivative of a cast is taken to be 1 (Bengio et al., arXiv 1308.3432)."""

    name: Literal["straight_through"] = "straight_through"
    meaning: ClassVar[str] = "1 everywhere"
    is_one: ClassVar[bool] = True


@GRADIENTS.register
class ClipMask(GradientKind):
    """0 for clipped elements, and for those at the largest number (Quartet, arXiv 2505.14669)."""

    name: Literal["clip_mask"] = "clip_mask"
    meaning: ClassVar[str] = "1 where the scaled element is below the largest number, 0 from there on"

    def factor(self, elements: "Tensor", fmt: NumberFormat) -> "Tensor":
        import torch

        return torch.where(elements.abs() < fmt.max, 1.0, 0.0)
