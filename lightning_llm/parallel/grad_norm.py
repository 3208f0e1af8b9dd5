"""The global gradient norm, and clipping to it."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_llm.linalg import local
from lightning_llm.parallel.ep import is_ep_shard
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.tp import is_tp_shard


def gradient_norm(parameters: Iterable[nn.Parameter], layout: Layout, copies: Iterable[nn.Parameter] = ()) -> Tensor:
    """Return the 2-norm of all gradients, an fp32 scalar, the same on every rank, without waiting for the device.

    Squares are summed in fp64 over tensors, shards and pipeline stages, and the norm is rounded to fp32. The layout can
    then change the result only if the true norm is within 1e-16 of the midpoint of two fp32 numbers. `copies`: the
    parameters among `parameters` that another pipeline stage counts, so they are not counted here.
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    return global_norm(trained, _gradients(trained), layout, copies)


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, max_norm: float) -> None:
    """Scale all gradients by min(1, max_norm / norm) in place; `norm` is the result of `gradient_norm`."""
    if norm > max_norm:
        torch._foreach_mul_(_gradients(parameters), max_norm / norm)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def global_norm(
    parameters: Sequence[nn.Parameter], shards: Sequence[Tensor], layout: Layout, copies: Iterable[nn.Parameter] = ()
) -> Tensor:
    """Return the joint 2-norm, an fp32 scalar, of one tensor per parameter; `shards`: this rank's parts of them.

    Each tensor is sharded like its parameter. Tensors of the parameters in `copies` are counted by another pipeline
    stage. Collective; the result is equal on every rank.
    """
    elsewhere = {id(parameter) for parameter in copies}
    counted = [
        shard
        for parameter, shard in zip(parameters, shards, strict=True)
        if id(parameter) not in elsewhere and _is_counted(parameter, layout)
    ]
    total = shards[0].new_zeros((), dtype=torch.float64)
    if counted:
        total = torch.stack(_norms(counted)).square().sum()
    layout.reduce(total, dist.ReduceOp.SUM, *_sharing_groups(layout), "layers")
    return total.sqrt().float()


def parameter_gradient_norms(named: Mapping[str, nn.Parameter], layout: Layout) -> dict[str, float]:
    """Return {parameter name: 2-norm of its gradient} over all pipeline stages, the same on every rank.

    Squares are summed in fp64 over shards, so the layout changes these norms as little as `gradient_norm`. Parameters
    without a gradient are omitted. Collective; the host waits for the device.
    """
    trained = {name: parameter for name, parameter in named.items() if parameter.grad is not None}
    norms = torch.stack(_norms(_gradients(trained.values()))) if trained else torch.zeros(0, dtype=torch.float64)
    counted = [_is_counted(parameter, layout) for parameter in trained.values()]
    squares = norms.square() * torch.tensor(counted, dtype=torch.float64, device=norms.device)
    if len(squares):
        layout.reduce(squares, dist.ReduceOp.SUM, *_sharing_groups(layout))
    own = dict(zip(trained, squares.sqrt().tolist(), strict=True))
    return {name: norm for stage in layout.gather_over_stages(own) for name, norm in stage.items()}


def _norms(shards: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each shard, scalars in fp64."""
    return list(torch._foreach_norm(list(shards), 2, dtype=torch.float64))


def _is_counted(parameter: nn.Parameter, layout: Layout) -> bool:
    """Return whether this rank counts its part of `parameter` in a sum over ranks.

    A parameter that all ranks of a tensor-parallel group hold whole is counted by the first of them only, and so are
    those of ranks that share nothing but experts. The norm is then the same on all ranks even if their copies differ.
    """
    if is_tp_shard(parameter) or is_ep_shard(parameter):
        return True
    group = layout.group("ep") if "ep" in _sharing_groups(layout) else None
    return layout.coordinates.tp == 0 and (group is None or group.rank() == 0)


def _sharing_groups(layout: Layout) -> list[str]:
    """Return the groups of ranks that hold parts of the same parameters."""
    sharded = layout.shards and layout.degrees.fsdp > 1  # ranks that share experts are among those of FSDP2 then
    experts = layout.group("ep") is not None and not sharded
    return ["width", *(["fsdp"] if sharded else []), *(["ep"] if experts else [])]
