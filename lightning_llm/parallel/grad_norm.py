"""The global gradient norm, and clipping to it."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_llm.local_part import local
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.tensor import is_tp_shard


def gradient_norm(parameters: Iterable[nn.Parameter], layout: Layout, copies: Iterable[nn.Parameter] = ()) -> Tensor:
    """Return the 2-norm of all gradients, a scalar in fp32, the same on every rank; the host waits for nothing.

    Squares are summed in fp64 over tensors, shards and pipeline stages, and the norm is rounded to fp32: how gradients
    are cut then shows only where the true norm lies within 1e-16 of the middle between two fp32 numbers. `copies`:
    those of `parameters` that another stage counts.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    return global_norm(trained, _gradients(trained), layout, copies)


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients by min(1, max_norm / norm) in place, where `norm` is what `gradient_norm` gave."""
    if norm > max_norm:
        torch._foreach_mul_(_gradients(parameters), max_norm / norm)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def global_norm(
    parameters: Sequence[nn.Parameter], shards: Sequence[Tensor], layout: Layout, copies: Iterable[nn.Parameter] = ()
) -> Tensor:
    """Return the 2-norm, a scalar in fp32, of tensors of which `shards` holds this rank's part, one per parameter.

    Each is cut as its parameter is; those of `copies` are counted by another stage. Collective; equal on every rank.
    """
    elsewhere = {id(parameter) for parameter in copies}
    # What every rank of a tensor-parallel group holds whole is counted by its first: a sum over the group, and with it
    # the norm, is one number on all, whatever each has.
    first = layout.coordinates.tp == 0
    counted = [
        shard
        for parameter, shard in zip(parameters, shards, strict=True)
        if id(parameter) not in elsewhere and (first or is_tp_shard(parameter))
    ]
    total = shards[0].new_zeros((), dtype=torch.float64)
    if counted:
        norms: list[Tensor] = list(torch._foreach_norm(counted, 2, dtype=torch.float64))
        total = torch.stack(norms).square().sum()
    layout.reduce(total, dist.ReduceOp.SUM, "tp", *(["fsdp"] if layout.shards else []), "pp")
    return total.sqrt().float()
