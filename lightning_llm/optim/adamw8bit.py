"""AdamW with both moments kept in 8 bits, block by block (Dettmers et al. 2022, arXiv 2110.02861, section 2).

torchao's AdamW8bit is not taken: it counts blocks along each rank's own shard, and keeps small or odd shards in fp32,
so that bits and state depend on the layout (0.18.0: a [172, 64] matrix gets other bits on two ranks than on one, and
2.03 or 8 bytes per element), and it runs by torch.compile alone.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_llm.linalg import local
from lightning_llm.optim.kinds import AdamW8bitConfig
from lightning_llm.optim.matrices import MatrixOptimizer, gradient_of
from lightning_llm.optim.optimizer import adamw_change

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""The moments by name, and whether their code has a sign."""


class AdamW8bit(MatrixOptimizer):
    """AdamW with 8-bit moments for matrices of blocks and head, and torch's AdamW for all other parameters.

    Each step dequantizes the moments to fp32, updates the weights, and quantizes the moments again.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], config: AdamW8bitConfig):
        super().__init__(parameters, config, ("hidden", "head"))
        self.config = config

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return moments of zero: uint8 codes in the parameter's shape, and fp32 scales, one per block of a row."""
        weight, blocks = local(parameter), -(-parameter.shape[1] // self.config.block_size)
        own_blocks = -(-weight.shape[1] // self.config.block_size)
        state: dict[str, Tensor] = {"step": torch.zeros(())}
        for name, signed in MOMENTS.items():
            codes = torch.full_like(weight, zero_code(signed), dtype=torch.uint8)
            scales = weight.new_zeros((weight.shape[0], own_blocks), dtype=torch.float32)
            state[f"{name}_codes"] = _sharded_as(parameter, codes, parameter.shape[1])
            state[f"{name}_scales"] = _sharded_as(parameter, scales, blocks)
        return state

    def update(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._update(parameter, group["lr"], group["weight_decay"])

    def _update(self, parameter: nn.Parameter, rate: float, weight_decay: float) -> None:
        """Take AdamW's step with moments in fp32."""
        state, config = self.state[parameter], self.config
        kept = {name: (local(state[f"{name}_codes"]), local(state[f"{name}_scales"])) for name in MOMENTS}
        first, second = (self._read(*kept[name], signed) for name, signed in MOMENTS.items())
        state["step"] += 1
        gradient, count, betas = gradient_of(parameter).float(), state["step"].item(), (config.beta1, config.beta2)
        change = adamw_change(first, second, gradient, count, rate, betas, config.eps)
        self.write(parameter, lambda weight, rows: weight.mul_(1 - rate * weight_decay).sub_(change[rows]))
        for moment, (name, signed) in zip((first, second), MOMENTS.items(), strict=True):
            codes, scales = quantized(moment, self.config.block_size, signed)
            kept[name][0].copy_(codes)
            kept[name][1].copy_(scales)

    def _read(self, codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
        return dequantized(codes, scales, self.config.block_size, signed)


def quantized(values: Tensor, block_size: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantize fp32 `values` [R, C]: return uint8 codes [R, C] and fp32 scales [R, ceil(C / block_size)].

    `signed`: use the code with a sign. A block's scale is its largest magnitude. The code is that of the nearest of
    `dynamic_map`'s values times the scale; ties take the lower. A non-finite value makes its block's scale non-finite,
    and with it all dequantized values.
    """
    columns = values.shape[1]
    blocks = F.pad(values, (0, -columns % block_size)).unflatten(1, (-(-columns // block_size), block_size))
    scales = blocks.abs().amax(dim=2)
    scaled = blocks / torch.where(scales == 0, 1.0, scales).unsqueeze(2)
    table = _table(signed, values.device)
    middles = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(scaled, middles, out_int32=True).to(torch.uint8)
    return codes.flatten(1)[:, :columns], scales


def dequantized(codes: Tensor, scales: Tensor, block_size: int, signed: bool) -> Tensor:
    """Return the fp32 values [R, C] of the codes and scales of `quantized`."""
    values = _table(signed, codes.device)[codes.int()]
    return values.mul_(scales.repeat_interleave(block_size, dim=1)[:, : codes.shape[1]])


def dynamic_map(signed: bool) -> list[float]:
    """Return the 256 values that codes stand for, ascending, in [-1, 1] or, unsigned, [0, 1] (sections 1.3 and 2.2).

    Leading zeros of a code are a decimal exponent of 0 to -6; the bits left after them and an indicator bit count the
    centers of equal parts of [0.1, 1]. Unsigned codes have one more bit there. 0 and 1 have separate codes.
    """
    values = [0.0, 1.0]
    for exponent in range(7):
        parts = 2**exponent if signed else 2 ** (exponent + 1)
        for part in range(parts):
            value = (0.1 + 0.9 * (part + 0.5) / parts) * 10.0 ** (exponent - 6)
            values += [value, -value] if signed else [value]
    return sorted(values)


def zero_code(signed: bool) -> int:
    """Return the code that stands for 0, as initial value of the moments."""
    return dynamic_map(signed).index(0.0)


@cache
def _table(signed: bool, device: torch.device) -> Tensor:
    return torch.tensor(dynamic_map(signed), dtype=torch.float64).float().to(device)


def _sharded_as(parameter: nn.Parameter, part: Tensor, columns: int) -> Tensor:
    """Return `part`, this rank's of a [rows of `parameter`, columns] tensor, as a DTensor sharded as `parameter` is."""
    if not isinstance(parameter, DTensor):
        return part
    shape, stride = torch.Size((parameter.shape[0], columns)), (columns, 1)
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
