"""Weights of linears that ranks gather as FP8 codes: codes of a shard, and operands of the whole.

The codes are those of `quantize.quantise` of the whole weight in the compute dtype. The gathered weight has their
values on the format's grid, exact in any 16-bit dtype; both GEMMs multiply these like the result of an ordinary cast.
"""

import torch
from torch import Tensor

from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.precision.cast import inductor, scales
from lightning_llm.precision.cast.quantize import Operand
from lightning_llm.precision.cast.rounding import torch_dtype
from lightning_llm.precision.cast.scales import Scaled
from lightning_llm.precision.linear.module import QuantisedLinear
from lightning_llm.precision.linear.plan import ROLES
from lightning_llm.precision.linear.weight_casts import WantedCast, WeightCasts
from lightning_llm.precision.linear.weight_rules import codes_cast


class GatheredWeight(WeightCasts):
    """Weight of `layer` that is sharded by rows over ranks.

    `amax`: largest magnitude of the whole weight, None until reduced. A reduced amax is valid within a training step
    (`begin_step` to `end_step`); outside, weights may have changed.
    """

    def __init__(self, layer: QuantisedLinear):
        super().__init__()
        self.layer = layer
        self.amax: Tensor | None = None
        self.gathered: Scaled | None = None
        """Scales of the last gathered codes; None if the weight was gathered in the compute dtype."""

    def begin_step(self) -> None:
        """Begin a training step: discard the amax, because the weights may have changed since it was reduced."""
        super().begin_step()
        self.amax = None

    @property
    def cast(self) -> CastConfig | None:
        """Cast of the gathered codes; None if the weight is gathered uncast: bypassed, observed, or not allowed."""
        layer = self.layer
        return None if layer.bypass or layer.observe is not None else codes_cast(layer.plan.casts)

    def amax_of(self, shard: Tensor) -> Tensor:
        """Return the largest magnitude of this rank's `shard`, an fp32 scalar, 0 of an empty one."""
        if shard.numel() == 0:
            return torch.zeros((), device=shard.device)
        return inductor.tensor_amax(self.layer.plan.backend)(shard.contiguous())

    def scales(self, shard: Tensor, cast: CastConfig) -> Scaled:
        """Return the scales of the whole weight; `shard` [n, K] only gives dtype and device."""
        delayed = None
        if cast.scale_kind.from_history:
            self.layer.materialise_state(shard.device)
            delayed = None if self.layer.scale is None else self.layer.scale[ROLES.index("w")]
        return scales.scale(shard, cast, 1, self.amax, delayed)

    def codes(self, shard: Tensor, cast: CastConfig, scaled: Scaled) -> Tensor:
        """Return the codes of `shard` [n, K] of the weight in the compute dtype: uint8 [n, K]."""
        if shard.numel() == 0:
            return shard.new_zeros(shard.shape, dtype=torch.uint8)
        values = inductor.grid_values(cast, self.layer.plan.backend)(shard, scaled.multiplier)
        return torch.copysign(values, shard).to(torch_dtype(cast.number_format)).view(torch.uint8)

    def decode(self, codes: Tensor, into: Tensor, cast: CastConfig) -> None:
        """Write the values of `codes` [N, K] into `into` [N, K]; zeros are positive, as in the emulation."""
        into.copy_(codes.view(torch_dtype(cast.number_format))).add_(0.0)

    def operand(self, wanted: WantedCast) -> Operand:
        """Return the operand `wanted` from the gathered codes, or cast the weight if it was not gathered as codes."""
        if self.gathered is None:
            return wanted.make()
        weight = wanted.weight()
        numbers = weight.to(torch.bfloat16)
        if self.gathered.block is not None:  # a power of two, which stays with the operand
            numbers = (weight.float() * self.gathered.block).to(torch.bfloat16)
        return Operand(numbers, self.gathered.factor)

    def known_amax(self) -> Tensor | None:
        """Return the amax of a weight gathered as codes, which cannot be computed from them."""
        return None if self.gathered is None else self.amax

    def check_high(self) -> None:
        """Raise RuntimeError if the weight was gathered as codes, so an unquantized GEMM cannot read it."""
        if self.gathered is not None:
            raise RuntimeError(
                f"the weight of {self.layer.name} was gathered as codes, but is read in high precision. Call the "
                "model, which gathers again, not the layer; or set precision.parameter_gather=high"
            )
