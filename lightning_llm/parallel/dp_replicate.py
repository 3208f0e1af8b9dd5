"""Torch code of the replica axis: gradients are summed over replicas once per step, in tree order."""

from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import nn

from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.axis import AxisOnRanks, Reduction
from lightning_llm.parallel.coded_sums import scatter_of
from lightning_llm.parallel.ep import is_ep_shard
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.tree import all_reduce_by, tree_reduce_scatter


class Replicas(AxisOnRanks):
    """Sums gradients over replicas, unless FSDP2 already does or the training algorithm does not sum over this axis."""

    def __init__(self, name: str, layout: Layout, group: dist.ProcessGroup):
        super().__init__(name, layout, group)
        self._sums = layout.tree and name not in layout.left_out
        self.multiple = group.size() if self._sums else 1

    def reductions(self, stage: Decoder) -> Callable[[nn.Parameter], Sequence[Reduction]]:
        scatter = scatter_of(self.layout, self.name)
        summed = (partial(all_reduce_by, group=self.group, scatter=scatter),) if self._sums else ()
        group, of_one_stage = self.layout.expert_group(self.name), partial(tree_reduce_scatter, subtrees=None)
        of_experts = (partial(all_reduce_by, group=group, scatter=of_one_stage),) if self._sums and group else ()
        return lambda parameter: of_experts if is_ep_shard(parameter) else summed
