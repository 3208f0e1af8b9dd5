"""All uses of undocumented torch interfaces, with an error if one is missing.

The range of versions is that of pyproject.toml.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, _utils

from lightning_llm.base.errors import ConfigError, Problem

TESTED = ">=2.11,<2.14"


def private(owner: Any, *names: str) -> Any:
    """Return the first existing attribute of `owner` among `names`: successive names of one thing, newest first.

    Raises:
        ConfigError: there is none; names the tested range of torch versions.
    """
    for name in names:
        found = getattr(owner, name, None)
        if found is not None:
            return found
    raise _untested(f"has no {_name(owner)}.{' or '.join(names)}")


def check_overridden(own: type, method: str) -> None:
    """Check that torch's base class of `own` has `method` with the same parameters as the overriding method.

    Otherwise torch would call another method, and the override would silently have no effect.

    Raises:
        ConfigError: it has not; names the tested range of torch versions.
    """
    ours, theirs = (list(signature(private(each, method)).parameters) for each in (own, own.__mro__[1]))
    if ours != theirs:
        raise _untested(f"has {_name(own.__mro__[1])}.{method}({', '.join(theirs)}), not ({', '.join(ours)})")


def _untested(what: str) -> ConfigError:
    text = f"{torch.__version__} {what}, which layouts need. Install torch{TESTED}, the versions this is tested with."
    return ConfigError(Problem("torch", text))


def _name(owner: Any) -> str:
    return str(getattr(owner, "__name__", owner))


def set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Set the timeout of collectives of `group`."""
    private(distributed_c10d, "set_timeout", "_set_pg_timeout")(timedelta(seconds=seconds), group)  # public since 2.14


def flattened(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Return one axis `name` over all ranks of `axes` of `mesh`, with a new process group. Collective."""
    made: DeviceMesh = private(DeviceMesh, "_flatten")(mesh[axes], name)
    return made


def side_by_side(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """Return the mesh of both axes. `inner` may come from `flattened`; such axes cannot be sliced from a mesh."""
    made: DeviceMesh = private(DeviceMesh, "_concatenate")([outer, inner])
    return made


def shard_offset(tensor: DTensor) -> tuple[int, ...]:
    """Return the offset of this rank's shard in the whole tensor, on each axis."""
    where = private(_utils, "compute_local_shape_and_global_offset")
    offset: tuple[int, ...] = where(tensor.shape, tensor.device_mesh, tensor.placements)[1]
    return offset


def all_gather(
    output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None, async_op: bool = False
) -> Any:
    """Fill `output` [R n, ...] with `tensor` [n, ...] of every rank, in their order; renamed in torch 2.13.

    With `async_op`, return the work to wait for.
    """
    return private(dist, "all_gather_single", "all_gather_into_tensor")(output, tensor, group=group, async_op=async_op)


def reduce_scatter(output: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill `output` [n, ...] with this rank's part of the sum of every rank's `tensor` [R n, ...]; renamed as above."""
    private(dist, "reduce_scatter_single", "reduce_scatter_tensor")(output, tensor, group=group)


def ranks_store() -> dist.Store:
    """Return the store through which the process group was initialized."""
    store: dist.Store = private(distributed_c10d, "_get_default_store")()
    return store


def scaled_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return `a b`, bf16, of fp8 `a` [M, K], row-major, and `b` [K, N], column-major, with scales of 1."""
    one = torch.ones((), device=a.device)
    product: torch.Tensor = private(torch, "_scaled_mm")(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return product


def fsdp_parameters(module: FSDPModule) -> Iterator[Any]:
    """Yield FSDP2's states of the parameters that `module` gathers together."""
    state = private(module, "_get_fsdp_state")()
    groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.13 there was only one
    for group in [private(state, "_fsdp_param_group")] if groups is None else groups:
        for each in group.fsdp_params:
            for name in ("reset_sharded_param", "padded_sharded_param_size", "all_gather_outputs", "_module_info"):
                private(each, name)
            yield each


def keeping_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context in which autograd ignores writes to `tensor`."""
    kept: AbstractContextManager[None] = private(torch.autograd, "_unsafe_preserve_version_counter")(tensor)
    return kept


def functional(name: str) -> Any:
    """Return the functional collective `name`, an operator that can be compiled into a graph."""
    return private(torch.ops._c10d_functional, name)
