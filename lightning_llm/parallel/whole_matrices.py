"""Gather each sharded matrix whole on one of the ranks that share it, apply a function, and shard the result again."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_llm.linalg import local
from lightning_llm.linalg.grouped import stacked
from lightning_llm.optim.matrices import on_each, on_one_rank
from lightning_llm.parallel.ep import is_ep_shard
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.torch_private import shard_offset

Region = tuple[slice, ...]
"""Region of a rank's part within the whole matrix."""


@dataclass(frozen=True)
class _Owned:
    """A sharded parameter, and the regions of all ranks' parts in it, in rank order.

    Of the weights of experts that ranks divide (`parallel.ep`), only this rank's experts count as the whole.
    """

    parameter: nn.Parameter
    regions: tuple[Region, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, columns] of the matrices that the ranks put together."""
        rows, columns = self.parameter.shape
        return rows // _divided(self.parameter), columns

    @property
    def count(self) -> int:
        """The number of these matrices."""
        return stacked(self.parameter) // _divided(self.parameter)


class WholeMatrices:
    """Applies a function of whole matrices to matrices sharded over ranks; an `optim.matrices.OnWhole`.

    As many matrices as there are ranks in the group are processed at a time. Each rank gathers one matrix, applies the
    function, and scatters the result: two all-to-alls of as many bytes as a rank holds. No matrix is processed twice
    within a group, but every replica does all the work. If the function is deterministic, the bits are the same under
    every layout.
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        self._regions: dict[int, tuple[Region, ...]] = {}

    def __call__(
        self,
        parameters: Sequence[nn.Parameter],
        part_of: Callable[[nn.Parameter], Tensor],
        function: Callable[[Tensor], Tensor],
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each of `parameters` and this rank's part of `function` of its matrix (`OnWhole`). Collective."""
        experts = [each for each in parameters if is_ep_shard(each)]
        others = [each for each in parameters if not is_ep_shard(each)]
        sharded = [each for each in others if isinstance(each, DTensor)]
        if sharded and len(sharded) < len(others):
            raise ValueError("either all parameters are sharded or none is")
        group = self.layout.sharing_group() if sharded else None
        yield from self._of_group(others, part_of, function, group)
        if experts:
            group = self.layout.expert_group("dp_shard") if self.layout.shards else None
            yield from self._of_group(experts, part_of, function, group)

    def _of_group(
        self,
        parameters: Sequence[nn.Parameter],
        part_of: Callable[[nn.Parameter], Tensor],
        function: Callable[[Tensor], Tensor],
        group: dist.ProcessGroup | None,
    ) -> Iterator[tuple[nn.Parameter, Tensor]]:
        if group is None:
            yield from on_one_rank(parameters, part_of, function)
            return
        regions = self._regions_of(parameters, group)
        largest_first = sorted(range(len(parameters)), key=lambda index: -parameters[index].numel())  # of like work
        for first in range(0, len(parameters), group.size()):
            batch = largest_first[first : first + group.size()]
            yield from _exchange([_Owned(parameters[i], regions[i]) for i in batch], part_of, function, group)

    def _regions_of(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[tuple[Region, ...]]:
        if any(id(each) not in self._regions for each in parameters):
            everyones: list[list[Region]] = [[] for _ in range(group.size())]
            dist.all_gather_object(everyones, [_region(each) for each in parameters], group=group)
            by_parameter = zip(*everyones, strict=True)
            self._regions |= {id(each): regions for each, regions in zip(parameters, by_parameter, strict=True)}
        return [self._regions[id(each)] for each in parameters]


def _exchange(
    batch: list[_Owned],
    part_of: Callable[[nn.Parameter], Tensor],
    function: Callable[[Tensor], Tensor],
    group: dist.ProcessGroup,
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Send matrix number n of `batch` to rank n of `group`, and yield this rank's parts of the results."""
    parts = [part_of(each.parameter) for each in batch]
    out = [part.numel() for part in parts] + [0] * (group.size() - len(batch))  # elements for each rank
    own = batch[group.rank()] if group.rank() < len(batch) else None
    regions = own.regions if own else ()
    sizes = [_size(region) for region in regions] or [0] * group.size()  # of the parts that this rank puts together
    received = parts[0].new_empty(sum(sizes))
    dist.all_to_all_single(received, torch.cat([part.flatten() for part in parts]), sizes, out, group=group)
    made = received
    if own is not None:
        whole = received.new_empty(own.shape)
        for region, values in zip(regions, received.split(sizes), strict=True):
            whole[region].copy_(values.view_as(whole[region]))
        result = on_each(function, whole, own.count)
        made = torch.cat([result[region].flatten() for region in regions])
    back = parts[0].new_empty(sum(out))
    dist.all_to_all_single(back, made, out, sizes, group=group)
    for each, part, values in zip(batch, parts, back.split(out)[: len(batch)], strict=True):
        yield each.parameter, values.view_as(part)


def _region(parameter: nn.Parameter) -> Region:
    """Return the region of this rank's part of a sharded parameter, empty if it has none."""
    if not isinstance(parameter, DTensor):
        raise TypeError("the parameter is not sharded")
    (row, *offsets), sizes = shard_offset(parameter), local(parameter).shape
    if (ranks := _divided(parameter)) > 1:
        row -= parameter.device_mesh.get_local_rank("ep") * (len(parameter) // ranks)
    return tuple(slice(offset, offset + size) for offset, size in zip((row, *offsets), sizes, strict=True))


def _divided(parameter: nn.Parameter) -> int:
    """Return the number of ranks that hold different experts of `parameter`, 1 if it has none."""
    if not (isinstance(parameter, DTensor) and is_ep_shard(parameter)):
        return 1
    axes = parameter.device_mesh.mesh_dim_names or ()
    return parameter.device_mesh.size(axes.index("ep"))


def _size(region: Region) -> int:
    return math.prod(each.stop - each.start for each in region)
