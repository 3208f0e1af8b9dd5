"""Weights of linears that ranks gather as FP8 codes: codes of a shard, and operands of the whole.

The codes are those of `quantize.quantize` of the whole weight in the compute dtype. The gathered weight has their
values on the format's grid, exact in any 16-bit dtype; both GEMMs multiply these like the result of an ordinary cast.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.precision.cast import inductor, scales
from lightning_llm.precision.cast.quantize import Operand, contraction_scales
from lightning_llm.precision.cast.rounding import torch_dtype
from lightning_llm.precision.cast.scales import BlocksToScale, Scaled, block_shape, blocked, per_block, unblocked
from lightning_llm.precision.linear.module import QuantizedLinear
from lightning_llm.precision.linear.plan import ROLES, WantedCast, WeightCasts
from lightning_llm.precision.linear.weight_rules import codes_cast


class GatheredWeight(WeightCasts):
    """Source of weight casts for a `layer` with a weight that is sharded by rows over ranks, and gathered as codes.

    `amax`: largest magnitude of the whole weight (an fp32 scalar) or of its square blocks [R, C], None until reduced. A
    reduced amax is valid within a training step (`begin_step` to `end_step`); outside, weights may have changed.
    """

    def __init__(self, layer: QuantizedLinear):
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
        """Cast by which codes are made; None if the weight is gathered in the compute dtype.

        That is the case if the layer is bypassed or observed, or if its casts allow no codes (`codes_cast`).
        """
        layer = self.layer
        return None if layer.bypass or layer.observe is not None else codes_cast(layer.plan.casts)

    def amax_of(self, shard: Tensor, cast: CastConfig, row: int, rows: int) -> Tensor:
        """Return the largest magnitudes of this rank's `shard` [n, K], fp32: a scalar, or one per block of the weight.

        The shard begins at row `row` of `rows`. Blocks outside of the shard have 0, so the maximum over ranks is
        that of the whole weight.
        """
        shape = block_shape(cast.block, 1)
        if shape is None:
            if shard.numel() == 0:
                return torch.zeros((), device=shard.device)
            return inductor.tensor_amax(self.layer.plan.backend)(shard.contiguous())
        found = torch.zeros(-(-rows // shape[0]), -(-shard.shape[1] // shape[1]), device=shard.device)
        if shard.numel():
            blocks = blocked(F.pad(shard, (0, 0, row % shape[0], 0)), shape)
            own = per_block(BlocksToScale(blocks, cast, shape).block_amax(), shape)
            found[row // shape[0] :][: len(own)] = own
        return found

    def scales(self, shard: Tensor, cast: CastConfig) -> Scaled:
        """Return the scales of the whole weight, from the reduced `amax`. `shard` only gives dtype and device."""
        delayed = None
        if cast.scale_kind.from_history:
            self.layer.materialise_state(shard.device)
            delayed = None if self.layer.scale is None else self.layer.scale[ROLES.index("w")]
        shape = block_shape(cast.block, 1)
        if shape is None or self.amax is None:
            return scales.scale(shard, cast, 1, self.amax, delayed)
        # The amax of each block represents the block; it is a number of the shard's dtype.
        return scales.scale_blocks(self.amax.to(shard.dtype)[:, None, :, None], cast, shape)

    def codes(self, shard: Tensor, cast: CastConfig, scaled: Scaled, row: int) -> Tensor:
        """Return the codes, uint8 [n, K], of `shard` [n, K], which begins at row `row` of the 16-bit weight."""
        if shard.numel() == 0:
            return shard.new_zeros(shard.shape, dtype=torch.uint8)
        multiplier, shape = scaled.multiplier, block_shape(cast.block, 1)
        if shape is not None:
            of_row = torch.arange(row, row + len(shard), device=shard.device) // shape[0]
            of_block = per_block(multiplier, shape)[of_row]  # [n, C]
            multiplier = of_block.repeat_interleave(shape[1], 1)[:, : shard.shape[1]]
        values = inductor.grid_values(cast, self.layer.plan.backend)(shard, multiplier)
        return torch.copysign(values, shard).to(torch_dtype(cast.number_format)).view(torch.uint8)

    def decode(self, codes: Tensor, into: Tensor, cast: CastConfig) -> None:
        """Write the values of `codes` [N, K] into `into` [N, K]; zeros are positive, as in the emulation."""
        into.copy_(codes.view(torch_dtype(cast.number_format))).add_(0.0)

    def operand(self, wanted: WantedCast) -> Operand:
        """Return the requested operand from the gathered codes, or cast the weight if it was not gathered as codes."""
        if self.gathered is None:
            return wanted.make()
        weight, scaled, cast = wanted.weight(), self.gathered, wanted.casts[wanted.slot]
        numbers = weight.to(torch.bfloat16)
        if scaled.block is None:
            return Operand(numbers, scaled.factor)
        axis = 1 if wanted.slot == "fprop.w" else 0
        if cast.scales_partial_sums:
            return Operand(numbers, scaled.factor, None, contraction_scales(scaled.block, cast, axis, weight))
        shape = block_shape(cast.block, axis)  # scales are powers of two, which stay with the operand
        product = (blocked(weight, shape).float() * scaled.block).to(torch.bfloat16)
        return Operand(unblocked(product, weight, shape), scaled.factor)

    def known_amax(self) -> Tensor | None:
        """Return the reduced amax if the weight was gathered as codes, else None."""
        return None if self.gathered is None else self.amax

    def check_unquantized(self) -> None:
        """Raise RuntimeError if the weight was gathered as codes, so an unquantized GEMM cannot read it."""
        if self.gathered is not None:
            raise RuntimeError(
                f"the weight of {self.layer.name} was gathered as codes, but is read in high precision. Call the "
                "model, which gathers again, not the layer; or set precision.parameter_gather=high"
            )
