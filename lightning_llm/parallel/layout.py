"""One rank's place in the device mesh: its coordinates, process groups, micro-batches and reductions."""

import functools
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_llm.config.schema import AlgorithmConfig, ParallelConfig
from lightning_llm.config.schema.casts import CastConfig
from lightning_llm.parallel.process_group import join_process_group
from lightning_llm.parallel.torch_private import all_gather, flattened, set_timeout
from lightning_llm.parallel.tree import Subtrees
from lightning_llm.plan.axes.axis import AXES, Dimension
from lightning_llm.plan.degrees import Coordinates, Degrees, micro_batches_of, replica_axes, shard_axes
from lightning_llm.plan.memory.units import sums_in_tree, uses_fsdp
from lightning_llm.plan.nodes import ranks_together

WITHIN, BETWEEN = "within_nodes", "between_nodes"
COMBINED: dict[str, Dimension] = {
    "dp": "data",
    "fsdp": "parameters",
    "sequence": "sequence",
    "width": "width",
    "layers": "layers",
}
"""{name of a group: dimension}: the group spans all axes that divide the dimension."""
SEQUENCE_PART = 1 << 24
"""See `Layout.micro_batches_at_once`: random bits of experts differ between the parts of a micro-batch's sequences."""


@dataclass(frozen=True)
class Layout:
    """This rank's layout. `mesh` is None for a single rank without a process group."""

    config: ParallelConfig
    degrees: Degrees
    rank: int = 0
    mesh: DeviceMesh | None = None
    shared_mesh: DeviceMesh | None = None
    """With context parallelism: one axis of all ranks over which FSDP2 shards."""
    expert_mesh: DeviceMesh | None = None
    """With expert parallelism: the ranks by "dp_replicate", "dp_shard" and "ep" of experts (`Degrees.of_experts`).

    "dp_shard" are those of dp_shard and cp that FSDP2 would shard the same experts over.
    """
    left_out: tuple[str, ...] = ()
    """Data-parallel axes over which the training algorithm does not sum gradients (`AlgorithmConfig.summed_axes`)."""
    gradient_cast: CastConfig | None = None
    """Cast of gradients that ranks send to be summed (`precision.gradient_reduction`)."""
    machines: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict, compare=False, repr=False)
    """{axes: mesh that splits their groups by machine}, for tree sums within machines first, then between them."""
    made_later: dict[str, dist.ProcessGroup] = field(default_factory=dict, compare=False, repr=False)
    """Groups that are created on first use, by name."""

    @classmethod
    def from_config(
        cls, config: ParallelConfig, degrees: Degrees, device: torch.device, ranks_per_node: int | None = None
    ) -> "Layout":
        """Return this rank's layout. Collective if a process group was joined: every rank must call it.

        `ranks_per_node`: consecutive ranks on one machine; None: all.
        """
        if not dist.is_initialized():
            return cls(config, degrees)
        # Every axis costs a group and its threads.
        axes = tuple(name for name, axis in AXES.items() if degrees.ranks(name) > 1 or axis.in_every_mesh)
        mesh = init_device_mesh(device.type, tuple(map(degrees.ranks, axes)), mesh_dim_names=axes)
        for name, dimension in COMBINED.items():
            several = tuple(axis for axis in AXES.cutting(dimension) if degrees.ranks(axis) > 1)
            if name != "fsdp" and len(several) > 1:
                flattened(mesh, several, name)
        sharing = tuple(axis for axis in shard_axes() if axis in axes)
        shared = flattened(mesh, sharing, "fsdp") if len(sharing) > 1 else None
        machines = _machines(config, degrees, device, ranks_per_node or degrees.world)
        experts = _expert_mesh(degrees, device) if degrees.ranks("ep") > 1 else None
        layout = cls(config, degrees, dist.get_rank(), mesh, shared, experts, machines=machines)
        for group in layout.own_groups():  # groups of a mesh have the backend's default timeout, not the world's
            set_timeout(group, config.timeout_seconds)
        return layout

    @classmethod
    def joined(
        cls, config: ParallelConfig, degrees: Degrees, device: torch.device, ranks_per_node: int | None = None
    ) -> "Layout":
        """Join the process group if there is more than one rank, and return this rank's layout.

        Raises:
            ConfigError: not all ranks joined, see `join_process_group`.
        """
        if degrees.world > 1:
            join_process_group(device, degrees.world, config.timeout_seconds)
        return cls.from_config(config, degrees, device, ranks_per_node)

    @property
    def coordinates(self) -> Coordinates:
        """This rank's coordinates on the mesh."""
        return self.degrees.coordinates(self.rank)

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank: this rank's index among the ranks that train on different data."""
        return self.degrees.number(self.rank, *AXES.cutting("data"))

    def summing(self, algorithm: AlgorithmConfig) -> "Layout":
        """Return the layout with gradients summed over the axes that `algorithm` chooses."""
        data = AXES.cutting("data")
        summed = algorithm.summed_axes(data)
        return replace(self, left_out=tuple(axis for axis in data if axis not in summed))

    @property
    def summed(self) -> tuple[str, ...]:
        """Groups over which gradients are summed: ("dp",), or fewer data axes if the training algorithm chooses so."""
        return tuple(axis for axis in AXES.cutting("data") if axis not in self.left_out) if self.left_out else ("dp",)

    @property
    def sums(self) -> int:
        """Number of separate gradient sums in a step, each over a part of its micro-batches; usually 1."""
        return self.degrees.ranks(*self.left_out)

    @property
    def shards(self) -> bool:
        """Whether FSDP2 manages the master weights: shards them, casts them, and gathers them for use."""
        return uses_fsdp(self.config, self.degrees)

    @property
    def tree(self) -> bool:
        """Whether gradients are summed in tree order."""
        return sums_in_tree(self.config)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the process group of `axis`, None if it is one rank.

        `axis`: an axis of the mesh, or "dp" (ranks that train on different data), "fsdp" (ranks that shard parameters),
        "sequence", "width" or "layers" (ranks that divide these), "ep", or "world".
        """
        if axis == "ep":
            return None if self.expert_mesh is None else self.expert_mesh.get_group("ep")
        if axis == "world":
            return None if self.mesh is None or self.degrees.world == 1 else dist.group.WORLD
        if axis == "fsdp" and self.shared_mesh is not None:
            return self.shared_mesh.get_group()
        axes = AXES.cutting(COMBINED[axis]) if axis in COMBINED else (axis,)
        several = [each for each in axes if self.degrees.ranks(each) > 1]
        if self.mesh is None or not several:
            return None
        return self.mesh.get_group(several[0] if len(several) == 1 else axis)

    def expert_group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the group of ranks with the same experts over `axis`, None for one.

        `axis`: "dp_replicate", "dp_shard" or "cp" of ranks that share experts; the last two are one where FSDP2 shards.
        """
        if (mesh := self.expert_mesh) is None:
            return self.group(axis)
        name = "dp_shard" if axis == "cp" else axis
        return mesh.get_group(name) if mesh[name].size() > 1 else None

    def joint_group(self, *axes: str) -> dist.ProcessGroup | None:
        """Return the group over all of `axes` of the mesh together, None if it is one rank.

        The first call for several axes is collective.
        """
        names = tuple(axis for axis in AXES if axis in axes and self.degrees.ranks(axis) > 1)
        if self.mesh is None or len(names) < 2:
            return self.group(names[0]) if names else None
        name = "_".join(names)
        if name not in self.made_later:
            group = flattened(self.mesh, names, name).get_group()
            set_timeout(group, self.config.timeout_seconds)
            self.made_later[name] = group
        return self.made_later[name]

    def sharing_group(self) -> dist.ProcessGroup | None:
        """Return the group of ranks that together hold one copy of this stage's parameters, None if it is one rank.

        The first call is collective, because ranks that shard over two axes have no such group yet.
        """
        axes = [name for name in (*(["fsdp"] if self.shards else []), "width") if self.group(name) is not None]
        if self.mesh is None or len(axes) < 2:
            return self.group(axes[0]) if axes else None
        sharing = AXES.cutting("parameters", "width")
        return self.joint_group(*(axis for axis in self.mesh.mesh_dim_names or () if axis in sharing))

    def subtrees(self, *axes: str) -> Subtrees | None:
        """Return the groups for a two-level tree sum over `axes`; None if one level suffices."""
        mesh = self.machines.get(axes)
        return None if mesh is None else Subtrees(mesh.get_group(WITHIN), mesh.get_group(BETWEEN))

    def writing_group(self) -> dist.ProcessGroup | None:
        """Return a CPU group of all ranks for a background thread, None if no ranks are joined.

        In one group, collectives of training and of the thread could be issued in a different order on each rank. The
        first call is collective.
        """
        if not dist.is_initialized():
            return None
        if "writing" not in self.made_later:
            timeout = timedelta(seconds=self.config.timeout_seconds)
            self.made_later["writing"] = dist.new_group(backend="gloo", timeout=timeout)
        return self.made_later["writing"]

    def own_groups(self) -> list[dist.ProcessGroup]:
        """Return every group that this layout made, each once."""
        if self.mesh is None:
            return []
        names = [*(self.mesh.mesh_dim_names or ()), *COMBINED]
        groups = {id(group): group for name in names if (group := self.group(name)) is not None}
        groups |= {id(group): group for group in map(self.mesh.get_group, self.mesh.mesh_dim_names or ())}
        groups |= {id(group): group for group in self.made_later.values()}
        for each in (*self.machines.values(), *([] if self.expert_mesh is None else [self.expert_mesh])):
            groups |= {id(group): group for group in map(each.get_group, each.mesh_dim_names or ())}
        return [group for group in groups.values() if group is not dist.group.WORLD]

    def micro_batches(self, count: int) -> list[int]:
        """Return the global indices of the `count` micro-batches that this rank computes in a step."""
        return micro_batches_of(self.degrees, self.config.zero_stage, self.rank, count)

    @property
    def sending_ranks(self) -> list[int]:
        """Ranks that send rows to the experts here, in order; none if experts here take whole micro-batches of one."""
        if (group := self.group("ep")) is not None:
            return dist.get_process_group_ranks(group)
        return [self.rank] if self.degrees.sequence > 1 else []

    def validation_batches_at_once(self, batch: int) -> list[int]:
        """Return the global indices of the validation batches of `sending_ranks`, all of which run number `batch`.

        In the form of `micro_batches_at_once`.
        """
        data = AXES.cutting("data")
        numbers = {rank: batch * self.degrees.dp + self.degrees.number(rank, *data) for rank in self.sending_ranks}
        return [self._of_part(number, rank) for rank, number in numbers.items()]

    def micro_batches_at_once(self, count: int) -> list[list[int]]:
        """Return for each of a rank's `count` micro-batches those of `sending_ranks` at the same time.

        Each is a global index plus `SEQUENCE_PART` times the part of its sequences that the sender has.
        """
        stage = self.config.zero_stage
        each = [
            [self._of_part(index, rank) for index in micro_batches_of(self.degrees, stage, rank, count)]
            for rank in self.sending_ranks
        ]
        return [list(at_once) for at_once in zip(*each, strict=True)] if each else [[]] * count

    def _of_part(self, index: int, rank: int) -> int:
        return index + SEQUENCE_PART * self.degrees.number(rank, *AXES.cutting("sequence"))

    def gather_micro_batches(self, values: Tensor) -> Tensor:
        """Return [dp * n] in the order of global micro-batches, on every rank, from this rank's `values` [n]."""
        group = self.group("dp")
        if group is None:
            return values
        gathered = values.new_empty(self.degrees.dp * len(values))
        all_gather(gathered, values.contiguous(), group=group)
        ordered = torch.empty_like(gathered)
        ordered[_gathered_order(self.degrees, self.config.zero_stage, len(values), values.device)] = gathered
        return ordered

    def gather_over_stages(self, value: Any) -> list[Any]:
        """Return the `value` of every pipeline rank, first stage first; [value] without a pipeline."""
        group = self.group("layers")
        if group is None:
            return [value]
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, value, group=group)
        return gathered

    def reduce(self, tensor: Tensor, op: Any, *axes: str) -> Tensor:
        """Reduce `tensor` in place over one axis after another of `axes` (default: "dp") and return it."""
        for axis in axes or ("dp",):
            group = self.group(axis)
            if group is not None:
                dist.all_reduce(tensor, op=op, group=group)
        return tensor


def _machines(
    config: ParallelConfig, degrees: Degrees, device: torch.device, ranks_per_node: int
) -> dict[tuple[str, ...], DeviceMesh]:
    """Return the meshes of `Layout.machines`, over all ranks in order: ranks of a machine are consecutive."""
    meshes: dict[tuple[str, ...], DeviceMesh] = {}
    summed: list[tuple[str, ...]] = [shard_axes()] if uses_fsdp(config, degrees) else []
    for axes in [*summed, *((axis,) for axis in replica_axes())]:
        together = ranks_together(degrees, axes, ranks_per_node)
        if not sums_in_tree(config) or together == 1:
            continue
        ranks, names = degrees.ranks(*axes), list(AXES)
        inner = degrees.ranks(*names[names.index(axes[-1]) + 1 :])
        sizes = {
            "outer": degrees.world // (ranks * inner),
            BETWEEN: ranks // together,
            WITHIN: together,
            "inner": inner,
        }
        sizes = {name: size for name, size in sizes.items() if size > 1}
        meshes[axes] = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return meshes


def _expert_mesh(degrees: Degrees, device: torch.device) -> DeviceMesh:
    """Return the mesh of `Layout.expert_mesh`, over all ranks in order; no axis lies between dp and cp."""
    held, names = degrees.of_experts, list(AXES)
    sizes = {
        "outer": degrees.ranks(*names[: names.index("dp_replicate")]),
        "dp_replicate": held.dp_replicate,
        "dp_shard": held.dp_shard * held.cp,
        "ep": degrees.ranks("ep"),
        "inner": degrees.ranks(*names[names.index("cp") + 1 :]),
    }
    sizes = {name: size for name, size in sizes.items() if size > 1 or name.startswith("dp")}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


@functools.cache
def _gathered_order(degrees: Degrees, zero_stage: int, count: int, device: torch.device) -> Tensor:
    """Return int64 [dp * count]: the global index of each micro-batch, rank by rank.

    The ranks of a data-parallel group are ordered by rank number, and every such group computes the same micro-batches.
    """
    ranks = degrees.first_group(*AXES.cutting("data"))
    order = [index for rank in ranks for index in micro_batches_of(degrees, zero_stage, rank, count)]
    return torch.tensor(order, device=device)
