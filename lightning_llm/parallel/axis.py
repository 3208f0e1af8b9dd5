"""Base class of the torch code of a mesh axis: how the axis changes the model and reduces gradients."""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module

import torch.distributed as dist
from torch import Tensor, nn

from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.axes.axis import AXES

Works = Iterator[dist.Work]
"""Consecutive collectives: the next one starts when it is requested, after the previous one has ended."""
Reduction = Callable[[Tensor], Works]
"""Reduces a flat tensor over ranks (usually a sum), in place."""


class AxisOnRanks:
    """Torch code of the mesh axis `name` of `layout`, which has more than one rank.

    The base class changes neither model nor gradients; a subclass per axis overrides the methods.
    """

    multiple = 1
    """The tensors passed to a `Reduction` of this axis have a multiple of this many elements (padded if needed)."""

    def __init__(self, name: str, layout: Layout, group: dist.ProcessGroup):
        self.name, self.layout, self.group = name, layout, group

    def cut(self, stage: Decoder) -> None:
        """Split the parameters and operations of `stage` over the ranks of the axis, in place.

        Called on the meta device, before blocks are checkpointed, compiled and sharded by FSDP2.
        """

    def reductions(self, stage: Decoder) -> Callable[[nn.Parameter], Sequence[Reduction]]:
        """Return a function: parameter -> reductions of its gradient over the axis, applied once per step.

        Sums made by FSDP2 within a backward pass are excluded. Parameters with the same reductions get equal objects.
        """
        return lambda parameter: ()


def axes_on_ranks(layout: Layout) -> list[AxisOnRanks]:
    """Return the `AxisOnRanks` of every axis of `layout` with more than one rank, innermost first."""
    found = []
    for name, axis in reversed(list(AXES.every().items())):
        if (group := layout.group(name)) is not None:
            module, _, kind = axis.on_ranks.partition(":")
            found.append(getattr(import_module(module), kind)(name, layout, group))
    return found


def all_reduce(flat: Tensor, group: dist.ProcessGroup) -> Works:
    """Sum `flat` over `group`."""
    yield dist.all_reduce(flat, group=group, async_op=True)
