"""FSDP2 for ZeRO-1, 2 and 3 and their hybrids, and the one home of mixed precision where parameters are sharded.

Masters are kept in shards in the recipe's master dtype. They are gathered in the compute dtype, which is the cast that
the model makes on use when nothing is sharded: the same bits (Zhao et al. 2023, arXiv 2304.11277; torchtitan does it
so); in the master's where gradients are not to be rounded (`PrecisionConfig.gather_dtype`). Token and position
embeddings are gathered as they are, since a lookup's gradient must not be summed in 16 bit.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.torch_private import side_by_side
from lightning_llm.parallel.tree import TreeReduceScatter
from lightning_llm.plan.nodes import SHARD_AXES


def shard_decoder(
    model: Decoder, layout: Layout, gather_dtype: torch.dtype, reduce_dtype: torch.dtype
) -> list[TreeReduceScatter]:
    """Shard `model` in place, on the meta device: block by block, head and embedding by themselves, the rest as one.

    Where embedding and head are one parameter it stays with the root, which is gathered for the whole of a step.
    Returns the reductions of all groups, none for parallel.reduction=native.
    """
    if layout.mesh is None:
        raise ValueError("sharding needs a process group, and this rank has joined none")
    replicas = layout.degrees.dp_replicate > 1 and not layout.tree  # the tree sums over replicas by itself
    if layout.shared_mesh is None:
        mesh = layout.mesh[("dp_replicate", "dp_shard") if replicas else ("dp_shard",)]
    else:  # an axis made of two cannot be sliced together with another
        shared = layout.shared_mesh
        mesh = side_by_side(layout.mesh["dp_replicate"], shared) if replicas else shared
    kept = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    cast = MixedPrecisionPolicy(param_dtype=gather_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    after_forward = layout.config.zero_stage == 3
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=cast, reshard_after_forward=after_forward)
    if model.head is not None:
        fully_shard(model.head, mesh=mesh, mp_policy=cast, reshard_after_forward=False)  # backward wants it at once
    if model.embedding is not None and not model.config.tie_embeddings:
        embedding = fully_shard(model.embedding, mesh=mesh, mp_policy=kept, reshard_after_forward=after_forward)
        embedding.set_unshard_in_backward(False)  # a lookup's backward pass needs no weight
    fully_shard(model, mesh=mesh, mp_policy=kept, reshard_after_forward=False)
    _prefetch_in_forward(model)
    scatters: list[TreeReduceScatter] = []
    for module in sharded_modules(model):
        # The loss is a mean over the whole step's tokens already, so gradients are summed, never averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if layout.tree:
            scatters.append(TreeReduceScatter(layout.subtrees(*SHARD_AXES)))
            own: Any = scatters[-1]
            module.set_custom_reduce_scatter(own)  # FSDP2 declares an abstract class, and calls these two methods
    return scatters


def _prefetch_in_forward(model: Decoder) -> None:
    """Have each group gather the next before its own forward pass is queued, one ahead; in a backward pass FSDP2 does.

    Left to itself it begins to gather a group when the host comes to it: behind, where the host is.
    """
    order: list[Any] = [
        each for each in (model.embedding, *model.blocks.values(), model.head) if isinstance(each, FSDPModule)
    ]
    for module, following in pairwise(order):
        module.set_modules_to_forward_prefetch([following])


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """Return every module that FSDP2 shards as a group of its own."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def reshard(model: nn.Module) -> None:
    """Give back what a forward pass without a backward left gathered; parameters are shards again."""
    for module in sharded_modules(model):
        module.reshard()
