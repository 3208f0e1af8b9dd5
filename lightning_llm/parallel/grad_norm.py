"""The global gradient norm, and clipping to it."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.local_part import local
from lightning_llm.parallel.tensor import is_tp_shard


def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float | None, layout: Layout, copies: Iterable[nn.Parameter] = ()
) -> float:
    """Scale all gradients by min(1, max_norm / norm) in place; return the 2-norm of the whole, from before.

    Squares are summed in fp64 over tensors, shards and pipeline stages, and the norm is rounded to fp32: how gradients
    are cut then shows only where the true norm lies within 1e-16 of the middle between two fp32 numbers. Equal on every
    rank; None for `max_norm` measures only. `copies`: those of `parameters` that another stage counts.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [local(parameter.grad) for parameter in trained if parameter.grad is not None]
    total = global_norm(trained, gradients, layout, copies)
    if max_norm is not None and total > max_norm:
        torch._foreach_mul_(gradients, max_norm / total)
    return total


def global_norm(
    parameters: Sequence[nn.Parameter], shards: Sequence[Tensor], layout: Layout, copies: Iterable[nn.Parameter] = ()
) -> float:
    """Return the 2-norm over all ranks of tensors of which `shards` holds this rank's part, one per parameter.

    Each is cut as its parameter is; those of `copies` are counted by another stage. Collective; equal on every rank.
    """
    elsewhere = {id(parameter) for parameter in copies}
    counted = [pair for pair in zip(parameters, shards, strict=True) if id(pair[0]) not in elsewhere]
    norms: list[Tensor] = list(torch._foreach_norm([shard for _, shard in counted], 2, dtype=torch.float64))
    squares = torch.stack(norms).square()
    sharded = torch.tensor([is_tp_shard(parameter) for parameter, _ in counted], device=squares.device)
    # What every rank of a tensor-parallel group holds whole is counted by its first: a sum over the group, and with it
    # the norm, is one number on all, whatever each has.
    total = squares.sum() if layout.coordinates.tp == 0 else squares[sharded].sum()
    layout.reduce(total, dist.ReduceOp.SUM, "tp", *(["fsdp"] if layout.shards else []), "pp")
    return total.sqrt().float().item()
