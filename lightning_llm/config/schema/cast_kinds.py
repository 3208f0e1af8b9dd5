"""Base class and registry of the scales of casts. Imports no torch.

A kind is a subclass in `precision/kinds/`, or in an installed package (docs/howto/extend.md). It declares its needs,
its stored form and its limits, which schema, planner, sharding, lint and native decision read; `scale` computes it.
"""

from typing import Any, ClassVar

from pydantic import Field

from lightning_llm.base.registry import Registry
from lightning_llm.config.schema.base import Group
from lightning_llm.config.schema.number_formats import NumberFormat

SCALES: Registry["ScaleKind"] = Registry("scale", "lightning_llm.precision.kinds.scales", key="name")
REGISTRIES: tuple[Registry[Any], ...] = (SCALES,)
"""The registries of kinds whose functions run within a cast."""


class ScaleKind(Group):
    """Base class of scales: the factor of a block's elements, which takes them into the range of the number format.

    The attributes describe the kind to code that never computes a scale. `scale` imports torch in its body.
    """

    meaning: ClassVar[str]
    """The factor that elements are multiplied by, in a few words."""
    source: ClassVar[str]
    """The library or paper that defines it."""
    label: ClassVar[str] = ""
    """Short name in tables of recipes."""
    significant_bits: ClassVar[int] = 0
    """Significant bits of a block's scale; 0 for powers of two, which are exact factors of an operand in bf16."""
    stored_bits: ClassVar[int] = 32
    """Bits of a block's scale in memory."""
    from_history: ClassVar[bool] = False
    """Whether it follows the amaxes of earlier steps (`delayed`) and not the tensor."""
    shares_exponent: ClassVar[bool] = False
    """Whether it is a shared exponent of a small block (the E8M0 scales of OCP Microscaling), so may be prescaled."""
    clips: ClassVar[bool] = False
    """Whether it clips large elements on purpose, which biases; such a cast may have `clip_gradient`."""
    reads: ClassVar[int] = 2
    """Number of times that a fused kernel reads the tensor, for times in `plan`."""
    engine: ClassVar[dict[tuple[str, str], str]] = {}
    """{(format, block): configuration of Transformer Engine (`native/express.py`) that has it}."""

    name: str = Field(description="a registered scale")

    def problem(self, format: str, block: str) -> str | None:
        """Return why the scale is not defined for blocks `block` of `format`; None if it is."""
        return None

    def needs_tensor_amax(self, block: str) -> bool:
        """Whether it depends on the amax of the whole tensor, which shards must agree on."""
        return block == "tensor" and not self.from_history

    def has_factor(self, block: str) -> bool:
        """Whether it has an fp32 factor of the whole tensor (`Scaled.tensor`), which multiplies the product."""
        return False

    def unclipped_prescale(self, fmt: NumberFormat) -> float:
        """Return the largest `prescale` with which no element is clipped at the largest number of `fmt`."""
        return 1.0

    def scale(self, of: Any) -> Any:
        """Return the `Scaled` of a `BlocksToScale` (`precision/cast/scales.py`), a function that can be compiled."""
        raise NotImplementedError

    def stored(self, scaled: Any) -> Any:
        """Return the form of scales that kernels store, as a tensor of `scaled.block`'s shape."""
        return scaled.multiplier if scaled.block is None else scaled.block
