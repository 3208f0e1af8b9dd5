"""Seconds of an optimizer step on the plan's cluster: stages, schedule, reductions and update. Imports no torch."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from lightning_llm.config.schema import ClusterConfig
from lightning_llm.config.schema.optim import ParameterShard
from lightning_llm.model.flops import flops_per_token
from lightning_llm.model.structure import experts_by_linear, linear_names
from lightning_llm.optim.kinds import state_bytes
from lightning_llm.plan.attention_kernel import takes_blocks
from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.degrees import Degrees, replica_axes
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
"""A part of a step is set to 0 if it is below this fraction of the step, since it is only a rounding error."""
CLIPPING_READS = 3
"""Reads and writes of gradients outside the update: the norm, and scaling by the clipping factor."""


class NoTimeError(ValueError):
    """The time of a step cannot be predicted: casts are emulated, or the cluster has no peak for their format."""


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer step.

    `seconds` by part (`PARTS`) are those of the busiest rank, with its waiting as `bubble`; their sum is the step.
    `bubble_fraction` is the mean fraction of a step that ranks wait for other stages. `model_flops` are the step's
    FLOPs by `model.flops`; `needed` are the FLOPs per token that MFU counts.
    """

    seconds: dict[str, float]
    bubble_fraction: float
    model_flops: float
    tokens: int
    world: int
    needed: NeededFlops

    @property
    def total(self) -> float:
        """Total seconds of the step."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and device."""
        return self.tokens / self.world / self.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: time of the step's needed FLOPs at the peaks of their formats, over the step's time.

        At most 1: a needed FLOP takes at least its time at peak, and no rank works longer than the step.
        """
        return self.needed.seconds * self.tokens_per_second


def no_time(plan: Plan, cluster: ClusterConfig) -> str | None:
    """Return why the time of a step cannot be predicted, e.g. "emulated (REASON)"; None if it can.

    It cannot if the plan emulates casts, as `train` then would, because the model has the speeds of native kernels
    only.
    """
    if plan.decision.runs != "native":
        return f"{plan.decision.runs} ({plan.decision.reason})"
    formats = _formats(plan, Device(cluster)) if plan.config.precision.quantizes else None
    if formats is None or not formats.without_unit:
        return None
    return f"cluster.peak_tflops has no {' and no '.join(sorted(formats.without_unit))}, in which GEMMs run"


def _formats(plan: Plan, device: Device) -> Formats:
    model = plan.config.model
    return Formats(plan.config.precision, linear_names(model), model.num_layers, device, experts_by_linear(model))


class StepTimer:
    """Times one step of `plan` on its cluster.

    Raises:
        NoTimeError: the step has no time (`no_time`).
    """

    def __init__(self, plan: Plan, cluster: ClusterConfig, links: Links | None = None, *, as_native: bool = False):
        """`links`: the links between ranks; None: those of the cluster.

        `as_native`: time every cast on the device's unit even if this trainer emulates it, for runs of other trainers.
        """
        if not as_native and (reason := no_time(plan, cluster)) is not None:
            raise NoTimeError(f"the step has no estimated time: {reason}")
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
        # The norm of all gradients makes every update wait for the last rank.
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
        """Cost of a step's passes, per pipeline rank."""
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
        """Cost of each kind of pass."""
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
        """Return the parameter shards of the ranks at `pp_rank` of the pipeline."""
        units = units_at(self.config.model, self.parts[pp_rank], self.degrees)
        return list(units.shards(shard_ranks(self.config.parallel, self.degrees)))

    @cached_property
    def _kinds(self) -> dict[bool, list[int]]:
        """For each micro-batch, one of equal cost (first, second or last), for forward (True) and backward (False)."""
        last = self.plan.micro_batches - 1
        backward = [min(1, last)] * last + [last]
        return {True: [0, *backward[1:]], False: backward}

    def _send_seconds(self) -> list[float]:
        return self.links.send_seconds(boundary_bytes(self.config, self.degrees))

    def _beside(self, pp_rank: int) -> float:
        """Return the seconds of sums that start during a stage's last backward pass: over replicas, and over `cp`.

        Native sums are FSDP2's, one group at a time; all others use buckets (`parallel.gradient_sync`).
        """
        parts, sent, seconds = self.parts[pp_rank], self.sent[pp_rank], 0.0
        groups = sum(len(part.layers) for part in parts) + 2
        for kind, axes in once_beside(self.degrees):
            size = sent[kind, axes]
            library = kind == "all_reduce" and axes in (*replica_axes(), "edp")
            times = groups if library else -(-size // REPLICA_BUCKET_BYTES)
            seconds += self.links.seconds(kind, axes, size, times)
        return seconds / len(parts)

    def _after(self, pp_rank: int) -> Cost:
        """Return the cost of sends after the last backward pass: the bytes of `plan.traffic` that passes have not sent.

        These are tied embeddings, matrices that the optimizer needs whole, and gradients of parameters replicated over
        tensor-parallel ranks: a few vectors, which in fact start within the pass.
        """
        cost = Cost()
        for (kind, axes), total in self.sent[pp_rank].items():
            rest = total - self.passes[pp_rank].sent[kind, axes]
            if axes == "pp":  # hidden states, sent while ranks compute: `finish_times`
                stages = sum(2 - part.first - part.last for part in self.parts[pp_rank])
                rest -= self.plan.micro_batches * stages * boundary_bytes(self.config, self.degrees)
            if (kind, axes) in once_beside(self.degrees):
                continue
            times = -(-rest // REPLICA_BUCKET_BYTES)
            cost.spend("reductions", self.links.seconds(kind, axes, max(rest, 0), times))
        return cost

    def _update(self, pp_rank: int) -> float:
        """Return the seconds of clipping and of the update, which reads and writes its state once."""
        config = self.config
        state = state_bytes(self.shards(pp_rank), config.optim, config.chosen_algorithm, config.precision)
        moved = 2 * (state.parameters + state.optimizer) + (1 + CLIPPING_READS) * state.gradients
        return self.device.bytes_seconds(moved, 3)


def once_beside(degrees: Degrees) -> list[tuple[str, str]]:
    """Return the (kind, axis) of collectives that run once per step, during its last backward pass."""
    of_experts = ("edp",) if degrees.with_experts[0] in replica_axes() else ()
    over_replicas = product((TREE_SCATTER, "all_to_all", "all_gather", "all_reduce"), (*replica_axes(), *of_experts))
    return [*over_replicas, *product(("all_reduce",), (*AXES.cutting("sequence"), "ecp"))]


def _cost(times: StageTimes, each: Pass, micro_batches: int) -> Cost:
    if each.forward:
        return times.first_forward if each.micro_batch == 0 else times.forward
    return times.last_backward if each.micro_batch == micro_batches - 1 else times.backward


def finish_times(
    orders: Sequence[Sequence[Pass]], stages: int, seconds: Callable[[Pass], float], send_seconds: Sequence[float]
) -> list[float]:
    """Return the time at which each rank finishes its last pass, if passes wait for their inputs from other ranks.

    A forward pass needs the output of the previous stage, a backward pass the gradient of the next stage. An input from
    another rank takes the link's `send_seconds`: entry r is the link between rank r and the next one, both ways; the
    last entry links the last rank to the first. Ranks send while they compute.

    Raises:
        ValueError: the order deadlocks.
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
            raise ValueError("deadlock in the pipeline schedule: all ranks wait for each other")
    return clocks
