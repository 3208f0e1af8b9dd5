"""Uses of undocumented torch interfaces in layouts, with an error if one is missing, and a list of all such interfaces.

The range of versions is that of pyproject.toml.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from inspect import Parameter, signature
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, _utils

from lightning_llm.base.errors import ConfigError, Problem

TESTED = ">=2.11,<2.16"
INTERFACES: dict[str, str | None] = {
    "torch._C._ForceDispatchKeyGuard": None,
    "torch._C._current_graph_task_id": None,
    "torch._C._dispatch_tls_local_exclude_set": None,
    "torch._C._dispatch_tls_local_include_set": None,
    "torch._C._distributed_c10d._dump_fr_trace_json": None,
    "torch._dynamo.config.enable_aot_compile": None,
    "torch._dynamo.config.patch": None,
    "torch._dynamo.config.specialize_float": None,
    "torch._dynamo.exc.BackendCompilerFailed": None,
    "torch._foreach_add_": "self other",
    "torch._foreach_copy_": "self src",
    "torch._foreach_mul_": "self scalar",
    "torch._foreach_norm": "self ord dtype",
    "torch._fused_sdp_choice": "query key value attn_mask dropout_p is_causal enable_gqa",
    "torch._inductor.codecache.PyCodeCache.modules": None,
    "torch._inductor.config.emulate_precision_casts": None,
    "torch._inductor.config.get_hash": "",
    "torch._inductor.cpp_builder.get_compiler_version_info": "compiler",
    "torch._inductor.cpp_builder.get_cpp_compiler": "",
    "torch._inductor.cpu_vec_isa.VecISA": None,
    "torch._inductor.exc.InvalidCxxCompiler": None,
    "torch._inductor.runtime.cache_dir_utils.default_cache_dir": "",
    "torch._softmax_backward_data": "grad_output output dim input_dtype grad_input",
    "torch._subclasses.fake_tensor.FakeTensor": None,
    "torch._subclasses.fake_tensor.FakeTensorMode": "allow_non_fake_inputs",
    "torch._subclasses.fake_tensor.unset_fake_temporarily": "",
    "torch.autograd.Variable._execution_engine.queue_callback": None,
    "torch.autograd._unsafe_preserve_version_counter": "tensors",
    "torch.compiler.load_compiled_function": "file",
    "torch.distributed.all_gather_single|all_gather_into_tensor": "output_tensor input_tensor group async_op",
    "torch.distributed.checkpoint.filesystem._StorageInfo": "relative_path offset length",
    "torch.distributed.device_mesh.DeviceMesh._concatenate": "device_mesh_list",
    "torch.distributed.device_mesh.DeviceMesh._flatten": "self mesh_dim_name",
    "torch.distributed.distributed_c10d._get_default_store": "",
    "torch.distributed.distributed_c10d._resolve_process_group": None,
    "torch.distributed.distributed_c10d.set_timeout|_set_pg_timeout": "timeout group",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": "self",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.reset_sharded_param": "self",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState": None,
    "torch.distributed.isend": "tensor dst group",
    "torch.distributed.pipelining.PipelineStage._prepare_backward_infra": None,
    "torch.distributed.pipelining.PipelineStage._prepare_forward_infra": None,
    "torch.distributed.pipelining.schedules._batch_p2p": "p2p_ops",
    "torch.distributed.reduce_scatter_single|reduce_scatter_tensor": "output input group",
    "torch.distributed.tensor._sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached": "self op_schema",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": "global_shape mesh placements",
    "torch.fx.experimental._config.use_duck_shape": None,
    "torch.ops._c10d_functional.all_gather_into_tensor": "input group_size group_name",
    "torch.ops._c10d_functional.all_reduce": "input reduce_op group_name",
    "torch.ops._c10d_functional.reduce_scatter_tensor": "input reduce_op group_size group_name",
    "torch.ops._c10d_functional.wait_tensor": "tensor",
    "torch.ops.aten._local_scalar_dense": "self",
    "torch.ops.aten._scaled_dot_product_cudnn_attention": None,
    "torch.ops.aten._scaled_dot_product_efficient_attention": None,
    "torch.ops.aten._scaled_dot_product_flash_attention": None,
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": None,
    "torch.serialization._get_layout": "name",
    "torch.testing._internal.distributed.fake_pg.FakeStore": None,
    "torch.utils._python_dispatch.TorchDispatchMode": None,
    "torch.utils._pytree.tree_flatten": "tree",
    "torch.utils._pytree.tree_leaves": "tree",
    "torch.utils._pytree.tree_map": "func tree",
    "torch.utils._pytree.tree_map_only": "type_or_types_or_pred func tree",
    "torch.utils._pytree.tree_unflatten": "leaves treespec",
    "torch.utils._triton.get_triton_version": "",
    "torch.utils._triton.has_triton": "",
}
"""Undocumented interfaces of torch that the package uses, as `new|old` names: the parameters that its calls pass, in
order; None: not checked."""


def moved() -> Iterator[str]:
    """Yield a line for each of `INTERFACES` that the installed torch lacks or that takes other parameters."""
    for name, given in INTERFACES.items():
        owner, _, last = name.rpartition(".")
        found = next((each for each in map(partial(_found, owner), last.split("|")) if each is not None), None)
        if found is None:
            yield f"{name} is missing"
        elif given is not None:
            taken = list(_parameters(found))
            if not any(_accepts(each, given.split()) for each in taken):
                yield f"{name} takes ({') or ('.join(' '.join(each) for each in taken)}), not ({given})"


def _found(owner: str, name: str) -> Any:
    try:
        return resolve_name(f"{owner}.{name}")
    except (ImportError, AttributeError):
        return None


def _parameters(function: Any) -> Iterator[dict[str, bool]]:
    """Yield {parameter: whether it can be left out} for each overload of an operator of torch, or for a function."""
    operator = function if hasattr(function, "overloads") else getattr(torch.ops.aten, function.__name__, None)
    if operator is not None:
        for overload in operator.overloads():
            yield {each.name: each.has_default_value() for each in getattr(operator, overload)._schema.arguments}
    else:
        found, collecting = signature(function).parameters.values(), (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        yield {each.name: each.default is not each.empty or each.kind in collecting for each in found}


def _accepts(parameters: dict[str, bool], given: list[str]) -> bool:
    """Return whether a call can pass `given`, in this order: it has them, and all others have defaults."""
    required = {name for name, has_default in parameters.items() if not has_default}
    return [name for name in parameters if name in given] == given and required <= set(given)


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
    """Return the two-dimensional mesh of `outer` and `inner`. `inner` may come from `flattened`.

    Needed because a flattened axis cannot be sliced from the original mesh together with another axis.
    """
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


def fsdp_parameters(module: FSDPModule) -> Iterator[Any]:
    """Yield FSDP2's `FSDPParam` of each parameter in the group that `module` gathers together."""
    state = private(module, "_get_fsdp_state")()
    groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.13 there was only one
    for group in [private(state, "_fsdp_param_group")] if groups is None else groups:
        for each in group.fsdp_params:
            for name in ("reset_sharded_param", "padded_sharded_param_size", "all_gather_outputs"):
                private(each, name)
            for name in ("_module_info", "_orig_size"):
                private(each, name)
            yield each


def keeping_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Return a context in which writes to `tensor` do not increase the version that autograd checks."""
    kept: AbstractContextManager[None] = private(torch.autograd, "_unsafe_preserve_version_counter")(tensor)
    return kept


def functional(name: str) -> Any:
    """Return the functional collective `name`, an operator that can be compiled into a graph."""
    return private(torch.ops._c10d_functional, name)
