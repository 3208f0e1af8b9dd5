"""Context parallelism: each rank holds some tokens of a sequence and attends to the keys and values of all ranks.

A sequence is cut into two chunks per rank; rank r of R holds chunks r and 2R - 1 - r, so that the causal triangle
gives each the same work (Megatron-LM's `get_batch_on_this_cp_rank`). Keys and values are gathered before attention and
their gradients scattered after it (Llama 3, arXiv 2407.21783, section 3.3.2: simplest, and any mask works). Attention
does not depend on the order of keys, so they stay in the order of ranks; the mask accounts for their positions.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_llm.model.attention.attention import Kernel
from lightning_llm.model.attention.kernel_choice import Mask, SeenKeys
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.experts.kinds import MoE
from lightning_llm.model.experts.moe import MicroBatch, MixtureOfExperts
from lightning_llm.model.experts.router import within_capacity
from lightning_llm.parallel.axis import AxisOnRanks, Reduction, all_reduce
from lightning_llm.parallel.collectives import GroupRef, all_reduced, gather_tokens, gathered
from lightning_llm.parallel.ep import is_ep_shard
from lightning_llm.parallel.layout import Layout


def positions_of(rank: int, ranks: int, length: int, device: torch.device | None = None) -> Tensor:
    """Return the positions of the tokens of rank `rank` in a sequence of `length` tokens, int64 [length / ranks].

    They are the positions of its two chunks. The tensor is created on `device` (None: the CPU), so that no step waits
    for a copy.
    """
    chunks = torch.arange(length, device=device).view(2 * ranks, -1)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])


class SequenceSharder:
    """Selects this rank's tokens from whole sequences."""

    def __init__(self, layout: Layout):
        self.ranks, self.rank = layout.degrees.cp, layout.coordinates.cp

    def __call__(
        self, tokens: Tensor, labels: Tensor, document_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return (tokens, labels, positions, document ids) for the model and the loss, from whole sequences `[B, T]`.

        Tokens and labels are this rank's, `[B, T / R]`, at positions `[T / R]`, or None if sequences are not cut.
        Document ids stay whole, because a query compares its id with that of every key.
        """
        if self.ranks == 1:
            return tokens, labels, None, document_ids
        positions = positions_of(self.rank, self.ranks, tokens.shape[1], tokens.device)
        return tokens[:, positions], labels[:, positions], positions, document_ids


class ContextParallel(AxisOnRanks):
    """Gathers keys for attention and sums the partial gradients of the ranks that share a sequence."""

    def cut(self, stage: Decoder) -> None:
        replaced: Any = stage
        replaced.seen_keys = partial(keys_of_all_ranks, ranks=self.group.size())
        made: dict[Kernel, ContextAttention] = {}
        gather = partial(gather_tokens, group=GroupRef.from_group(self.group))
        for module in stage.modules():
            if isinstance(module, MixtureOfExperts):
                module.micro_batch = SharedMicroBatch(self.group)
        for block in stage.layers.values():
            attention: Any = block.attention
            if hasattr(attention, "gather"):  # makes keys and values from gathered latents
                attention.gather, attention.attend = gather, attention.kernel
            else:
                attention.attend = made.setdefault(attention.kernel, ContextAttention(self.group, attention.kernel))

    def reductions(self, stage: Decoder) -> Callable[[nn.Parameter], Sequence[Reduction]]:
        """Return the sum over these ranks for every gradient; none if FSDP2 shards over the ranks and sums itself.

        The gradients of divided experts are sums over the ranks that share them already.
        """
        if self.layout.shards:
            return lambda parameter: ()
        group = self.layout.expert_group(self.name)
        summed = (partial(all_reduce, group=self.group),)
        of_experts = () if group is None else (partial(all_reduce, group=group),)
        return lambda parameter: of_experts if is_ep_shard(parameter) else summed


class SharedMicroBatch(MicroBatch):
    """The tokens of a micro-batch that the ranks of `group` share."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.parts = GroupRef.from_group(group), group.size()

    @torch.no_grad()
    def load(self, load: Tensor) -> Tensor:
        return all_reduced(load, self.group)

    @torch.no_grad()
    def kept(self, chosen: Tensor, weights: Tensor, sequences: int, kind: MoE) -> Tensor | None:
        if kind.capacity_factor is None:
            return None
        length = self.parts * len(chosen) // sequences
        every = torch.cat([positions_of(rank, self.parts, length, chosen.device) for rank in range(self.parts)])
        order = every.argsort()

        def whole(part: Tensor) -> Tensor:  # [B T, k], in the order of one rank
            return gathered(part.unflatten(0, (sequences, -1)), self.group)[:, order].flatten(0, 1)

        kept = within_capacity(whole(chosen), whole(weights) if kind.drop == "weight" else weights, kind)
        if kept is None:
            raise ValueError("the kind has a capacity")
        own = positions_of(self.group.rank, self.parts, length, chosen.device)
        return kept.unflatten(0, (sequences, -1))[:, own].flatten(0, 1)


def keys_of_all_ranks(positions: Tensor, document_ids: Tensor | None, window: int | None, ranks: int) -> SeenKeys:
    """Return the keys, in the order of ranks, that this rank's queries at `positions` `[T / R]` may attend to.

    `document_ids` is `[B, T]`, in sequence order. With `window`, a query attends to at most the last `window` tokens,
    its own included.
    """
    length = ranks * positions.shape[-1]
    keys = torch.cat([positions_of(rank, ranks, length, positions.device) for rank in range(ranks)])  # [T]
    return SeenKeys.from_positions(positions, keys, document_ids, window)


class ContextAttention:
    """Attention of this rank's queries over the keys and values of all ranks of a group, computed by `kernel`.

    All blocks with the same kernel share one object, so that torch.compile makes one graph for them.
    """

    def __init__(self, group: dist.ProcessGroup, kernel: Kernel):
        self.group, self.kernel = GroupRef.from_group(group), kernel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Return `softmax(q k^T / sqrt(K)) v` `[B, T / R, H, K]` of `q`; `mask` is of `keys_of_all_ranks`.

        `k` and `v` `[B, T / R, G, K]` are gathered.
        """
        both = gather_tokens(torch.cat([k, v], dim=-1), self.group)  # [B, T, G, 2K]
        keys, values = both.chunk(2, dim=-1)
        return self.kernel(q, keys, values, mask)
