"""Seconds of an optimizer step on the plan's cluster: stages, their schedule, and what follows. Imports no torch."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from lightning_llm.config.schema import ClusterConfig
from lightning_llm.config.schema.optim import ParameterShard
from lightning_llm.model.flops import flops_per_token
from lightning_llm.model.structure import linear_names
from lightning_llm.optim.state_bytes import state_bytes
from lightning_llm.plan.attention_kernel import takes_blocks
from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.degrees import replica_axes
from lightning_llm.plan.memory.activations import boundary_bytes
from lightning_llm.plan.memory.buffers import REPLICA_BUCKET_BYTES
from lightning_llm.plan.memory.units import shard_ranks
from lightning_llm.plan.nodes import TREE_SCATTER, ranks_per_node
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.stages import Pass, parts_of, passes_of, rank_kind, stage_kind, units_at
from lightning_llm.plan.time.device import Device, Formats, NeededFlops, needed_flops
from lightning_llm.plan.time.links import Links
from lightning_llm.plan.time.operations import Cost, Operations
from lightning_llm.plan.time.stage import StageTimes, stage_times
from lightning_llm.plan.traffic import Sent, sent_at

ROUNDING = 1e-9
"""Of a step: less is no part of it, but what sums of floats leave."""
CLIPPING_READS = 3
"""How often gradients are read or written beside the update: their norm, and times the clipping factor."""


class NoTimeError(ValueError):
    """A step that has no time, because its casts are emulated or the cluster has no peak for them."""


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer step.

    `seconds` by part (`PARTS`) are those of the rank that works longest, its waiting as `bubble`; their sum is
    the step. `bubble_fraction` is the part of a step in which ranks wait for stages, all ranks' mean. `model_flops`
    are the step's by `model.flops`; `needed` are those of one token that MFU is of.
    """

    seconds: dict[str, float]
    bubble_fraction: float
    model_flops: float
    tokens: int
    world: int
    needed: NeededFlops

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and device."""
        return self.tokens / self.world / self.total

    @property
    def mfu(self) -> float:
        """The step's needed FLOPs over what the devices could do in that time at the peaks of their formats.

        At most 1: every needed FLOP takes the time of at least one at its format's peak, and no rank works longer than
        the step.
        """
        return self.needed.seconds * self.tokens_per_second


def no_time(plan: Plan, cluster: ClusterConfig) -> str | None:
    """Return why a step of `plan` has no time on `cluster`: "emulated (REASON)"; None where it has one.

    The decision is the plan's own, which `train` takes as well. Speeds of native kernels say nothing about emulation.
    """
    if plan.decision.runs != "native":
        return f"{plan.decision.runs} ({plan.decision.reason})"
    formats = _formats(plan, Device(cluster)) if plan.config.precision.quantises else None
    if formats is None or not formats.without_unit:
        return None
    return f"cluster.peak_tflops has no {' and no '.join(sorted(formats.without_unit))}, in which GEMMs run"


def _formats(plan: Plan, device: Device) -> Formats:
    model = plan.config.model
    return Formats(plan.config.precision, linear_names(model), model.num_layers, device)


class StepTimer:
    """Times one step of `plan` on its cluster.

    Raises NoTimeError where the step has no time (`no_time`).
    """

    def __init__(self, plan: Plan, cluster: ClusterConfig, links: Links | None = None, *, as_native: bool = False):
        """`links`: those between the ranks where they are not all as the cluster says.

        `as_native`: time every cast on the device's unit, whatever this trainer does: for runs of other trainers.
        """
        if not as_native and (reason := no_time(plan, cluster)) is not None:
            raise NoTimeError(f"no time: {reason}")
        config, degrees = plan.config, plan.degrees
        self.plan, self.config, self.degrees = plan, config, degrees
        self.device = Device(cluster)
        self.links = links or Links(cluster, degrees, ranks_per_node(config))
        self.formats = _formats(plan, self.device)
        self.operations = Operations(
            config, degrees, self.device, self.links, self.formats, plan.compiled, takes_blocks(plan)
        )
        self.parts = [parts_of(config.model, config.parallel, degrees, pp_rank) for pp_rank in range(degrees.pp)]
        sent: dict[Hashable, Sent] = {}
        self.sent: list[Sent] = []
        for pp_rank, parts in enumerate(self.parts):
            kind = rank_kind(config, parts)
            if kind not in sent:
                sent[kind] = sent_at(config, degrees, pp_rank)
            self.sent.append(sent[kind])

    @cached_property
    def time(self) -> StepTime:
        """The step's time."""
        pp, ranks = self.degrees.pp, range(self.degrees.pp)
        stages, kinds = sum(map(len, self.parts)), self._kinds
        seconds_of = {kind: cost.total for kind, cost in self.costs.items()}
        by_pass = {
            (forward, stage): [seconds_of[Pass(forward, stage, kind)] for kind in kinds[forward]]
            for forward, stage in product((True, False), range(stages))
        }
        ends = finish_times(self._orders, stages, lambda each: by_pass[each[0], each[1]][each[2]], self._send_seconds())
        after = [self._after(pp_rank) for pp_rank in ranks]
        # The norm of all gradients lets nobody update before the last has them.
        reduced = max(end + cost.total for end, cost in zip(ends, after, strict=True))
        updates = [self._update(pp_rank) for pp_rank in ranks]
        step = reduced + max(updates)
        spent = [self.passes[pp_rank].total + after[pp_rank].total + updates[pp_rank] for pp_rank in ranks]
        busiest = max(ranks, key=spent.__getitem__)
        whole = self.passes[busiest] + after[busiest]
        whole.spend("optimizer", updates[busiest])
        whole.spend("bubble", step - spent[busiest])
        tokens = self.config.data.global_batch_size * self.config.data.sequence_length
        return StepTime(
            seconds={part: value for part, value in whole.seconds.items() if value > ROUNDING * step},
            bubble_fraction=max(0.0, sum(step - each for each in spent) / (pp * step)),
            model_flops=float(flops_per_token(self.config.model, self.config.data.sequence_length)) * tokens,
            tokens=tokens,
            world=self.degrees.world,
            needed=needed_flops(self.config, self.formats, self.device),
        )

    @cached_property
    def passes(self) -> list[Cost]:
        """What the passes of a step cost the ranks at each place of the pipeline."""
        found = []
        for order in self._orders:
            counts = Counter(Pass(each[0], each[1], self._kinds[each[0]][each[2]]) for each in order)
            found.append(sum((self.costs[kind] * times for kind, times in counts.items()), start=Cost()))
        return found

    @cached_property
    def _orders(self) -> list[list[Pass]]:
        parallel, pp = self.config.parallel, self.degrees.pp
        return [passes_of(parallel, pp, pp_rank, self.plan.micro_batches) for pp_rank in range(pp)]

    @cached_property
    def costs(self) -> dict[Pass, Cost]:
        """What each kind of pass costs."""
        stages: dict[int, StageTimes] = {}
        made: dict[Hashable, StageTimes] = {}
        for pp_rank, parts in enumerate(self.parts):
            beside = self._beside(pp_rank)
            for part in parts:
                kind = stage_kind(self.config, part), beside
                if kind not in made:
                    made[kind] = stage_times(self.operations, part, beside)
                stages[part.index] = made[kind]
        kinds = [
            Pass(forward, stage, micro_batch)
            for forward, stage in product((True, False), stages)
            for micro_batch in set(self._kinds[forward])
        ]
        return {kind: _cost(stages[kind.stage], kind, self.plan.micro_batches) for kind in kinds}

    def shards(self, pp_rank: int) -> list[ParameterShard]:
        """Return what the ranks at `pp_rank` of the pipeline hold of every parameter."""
        units = units_at(self.config.model, self.parts[pp_rank], self.degrees.tp)
        return list(units.shards(shard_ranks(self.config.parallel, self.degrees)))

    @cached_property
    def _kinds(self) -> dict[bool, list[int]]:
        """For each micro-batch the one that costs as much, forward (True) and backward: first, second or last."""
        last = self.plan.micro_batches - 1
        backward = [min(1, last)] * last + [last]
        return {True: [0, *backward[1:]], False: backward}

    def _send_seconds(self) -> list[float]:
        return self.links.send_seconds(boundary_bytes(self.config, self.degrees))

    def _beside(self, pp_rank: int) -> float:
        """Return the seconds of sums that begin within a stage's last backward pass: over replicas, and over `cp`.

        The library's are FSDP2's, a group at a time; all others go by buckets (`parallel.gradient_sync`).
        """
        parts, sent, seconds = self.parts[pp_rank], self.sent[pp_rank], 0.0
        groups = sum(len(part.layers) for part in parts) + 2
        for kind, axes in once_beside():
            size = sent[kind, axes]
            library = kind == "all_reduce" and axes in replica_axes()
            times = groups if library else -(-size // REPLICA_BUCKET_BYTES)
            seconds += self.links.seconds(kind, axes, size, times)
        return seconds / len(parts)

    def _after(self, pp_rank: int) -> Cost:
        """Return what is sent after the last backward pass: all of `plan.traffic`'s bytes that passes have not sent.

        That is tied embeddings, and matrices that the optimizer takes whole. Gradients of what tensor-parallel ranks
        hold alike are counted here, too: a few vectors, which really begin within the pass.
        """
        cost = Cost()
        for (kind, axes), total in self.sent[pp_rank].items():
            rest = total - self.passes[pp_rank].sent[kind, axes]
            if axes == "pp":  # hidden states, sent while ranks compute: `finish_times`
                stages = sum(2 - part.first - part.last for part in self.parts[pp_rank])
                rest -= self.plan.micro_batches * stages * boundary_bytes(self.config, self.degrees)
            if (kind, axes) in once_beside():
                continue
            times = -(-rest // REPLICA_BUCKET_BYTES)
            cost.spend("reductions", self.links.seconds(kind, axes, max(rest, 0), times))
        return cost

    def _update(self, pp_rank: int) -> float:
        """Return the seconds of clipping and of the update, whose state is read and written once."""
        config = self.config
        state = state_bytes(self.shards(pp_rank), config.optim, config.chosen_algorithm, config.precision)
        moved = 2 * (state.parameters + state.optimizer) + (1 + CLIPPING_READS) * state.gradients
        return self.device.bytes_seconds(moved, 3)


def once_beside() -> list[tuple[str, str]]:
    """Return what is sent once per step, beside its last backward pass, by kind and axis."""
    over_replicas = product((TREE_SCATTER, "all_gather", "all_reduce"), replica_axes())
    return [*over_replicas, *product(("all_reduce",), AXES.cutting("sequence"))]


def _cost(times: StageTimes, each: Pass, micro_batches: int) -> Cost:
    if each.forward:
        return times.first_forward if each.micro_batch == 0 else times.forward
    return times.last_backward if each.micro_batch == micro_batches - 1 else times.backward


def finish_times(
    orders: Sequence[Sequence[Pass]], stages: int, seconds: Callable[[Pass], float], send_seconds: Sequence[float]
) -> list[float]:
    """Return when each rank has run the last pass of its order, where a pass waits for what it takes from other ranks.

    A forward pass takes the one of the stage before, a backward pass that of the stage behind; what comes from another
    rank is under way for the `send_seconds` of that link: between rank r and the next one, both ways, from the last to
    the first. Ranks send while they compute. Raises ValueError where an order never ends.
    """
    ranks = len(orders)
    forward_ends: dict[tuple[int, int], float] = {}
    backward_ends: dict[tuple[int, int], float] = {}
    clocks, places = [0.0] * ranks, [0] * ranks
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            clock, place, link = clocks[rank], places[rank], 0.0
            while place < len(order):
                own = order[place]
                forward, stage, micro_batch = own
                arrived: float | None
                if forward:
                    arrived = forward_ends.get((stage - 1, micro_batch)) if stage else 0.0
                    link = send_seconds[rank - 1] if stage and ranks > 1 else 0.0
                elif stage == stages - 1:
                    arrived, link = forward_ends.get((stage, micro_batch)), 0.0
                else:
                    arrived, link = (
                        backward_ends.get((stage + 1, micro_batch)),
                        send_seconds[rank] if ranks > 1 else 0.0,
                    )
                if arrived is None:
                    break
                clock = max(clock, arrived + link) + seconds(own)
                (forward_ends if forward else backward_ends)[stage, micro_batch] = clock
                place += 1
            left -= place - places[rank]
            clocks[rank], places[rank] = clock, place
        if left == before:
            raise ValueError("the ranks of a pipeline wait for each other")
    return clocks
