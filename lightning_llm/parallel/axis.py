"""Base class of torch's side of mesh axes: what the ranks of an axis do to the model, and to gradients."""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module

import torch.distributed as dist
from torch import Tensor, nn

from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.axes.axis import AXES

Works = Iterator[dist.Work]
"""Collectives one behind the other: each is begun when it is asked for, which is once the one before has ended."""
Reduction = Callable[[Tensor], Works]
"""Takes a flat tensor to what ranks agree on (mostly a sum), in place."""


class AxisOnRanks:
    """Axis `name` of `layout`, of more than one rank. The base class changes neither model nor gradients."""

    multiple = 1
    """Of how many elements `reductions` take a multiple."""

    def __init__(self, name: str, layout: Layout, group: dist.ProcessGroup):
        self.name, self.layout, self.group = name, layout, group

    def cut(self, stage: Decoder) -> None:
        """Cut a stage in place, on the meta device, before its blocks are recomputed, compiled and sharded by FSDP2."""

    def reductions(self, stage: Decoder) -> Callable[[nn.Parameter], Sequence[Reduction]]:
        """Return the reductions over the axis that each parameter's gradient goes through once per step.

        What FSDP2 sums within a backward pass is not among them. Parameters that go through the same get equal objects.
        """
        return lambda parameter: ()


def axes_on_ranks(layout: Layout) -> list[AxisOnRanks]:
    """Return torch's side of every axis of `layout` that has more than one rank, innermost first."""
    found = []
    for name, axis in reversed(list(AXES.items())):
        if (group := layout.group(name)) is not None:
            module, _, kind = axis.on_ranks.partition(":")
            found.append(getattr(import_module(module), kind)(name, layout, group))
    return found


def all_reduce(flat: Tensor, group: dist.ProcessGroup) -> Works:
    """Sum `flat` over `group`."""
    yield dist.all_reduce(flat, group=group, async_op=True)
