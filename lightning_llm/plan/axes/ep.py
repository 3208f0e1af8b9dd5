"""Expert parallelism: ranks of dp and cp that each hold some experts of every block. Imports no torch."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema import Config
from lightning_llm.model.experts.kinds import MoE
from lightning_llm.model.structure import feed_forward_of, for_layers
from lightning_llm.optim.kinds import DTYPE_BYTES
from lightning_llm.plan.axes.axis import AXES, MeshAxis, divisors
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.memory.units import uses_fsdp
from lightning_llm.plan.nodes import with_reduction

if TYPE_CHECKING:
    from lightning_llm.plan.traffic import RankStep, Sent


class ExpertAxis(MeshAxis):
    """Axis of neighboring ranks that divide the experts of each block and send their tokens to them.

    It folds into cp and dp_shard, or dp_replicate if nothing is sharded: other parameters do not depend on it.
    """

    name: ClassVar[str] = "ep"
    folds: ClassVar[bool] = True
    on_ranks: ClassVar[str] = "lightning_llm.parallel.ep:ExpertParallel"

    def layout_problems(self, config: Config, degrees: Degrees, fits: bool) -> Iterator[Problem]:
        """Yield why the layout has no `ep` ranks to share experts, or another axis divides experts, too."""
        ep, axis = degrees.ranks(self.name), degrees.with_experts[0]
        if ep == 1:
            return
        if not any(expert_counts(config)):
            text = f"is {ep}, and no block of the model has experts. Set 1, or choose a model with them (moe_tiny)."
            yield Problem("parallel.ep", text)
        managed = fits and uses_fsdp(with_reduction(config, degrees).parallel, degrees)
        names = list(AXES)
        for other in names[names.index("dp_replicate") + 1 : names.index("cp")]:
            if other != "dp_shard" and degrees.ranks(other) > 1:
                yield Problem(
                    "parallel.ep", f"is {ep}, and {other}={degrees.ranks(other)} lies between dp and cp. Set 1."
                )
        if fits and (problem := folding_problem(degrees, sharded=managed)):
            yield Problem("parallel.ep", problem, ep)
        if degrees.tp > 1:
            text = f"is {ep} with tp={degrees.tp}; both would divide whole experts. Set one of them to 1."
            yield Problem("parallel.ep", text)
        if managed and "selective" in checkpointing_modes(config):
            text = f"is selective for blocks with experts and ep={ep}, and torch cannot gather weights of experts by "
            text += "FSDP2 (ZeRO, or reduction=native) while it recomputes parts of a block. Set full or none, or ddp "
            text += "and tree sums."
            by_layer = config.parallel.activation_checkpoint_layers is not None
            yield Problem(f"parallel.activation_checkpoint{'_layers' if by_layer else ''}", text)
        algorithm = config.chosen_algorithm
        if axis not in algorithm.summed_axes(AXES.cutting("data")):
            text = f"is {algorithm.name}, which leaves gradients of {axis} ranks unsummed, and parallel.ep={ep} ranks "
            yield Problem("algorithm", f"{text}among them train the same experts. Set parallel.ep=1.")

    def search_degrees(self, config: Config, ranks: int) -> Sequence[int]:
        """Return the divisors of `ranks` that divide the experts of every block."""
        experts = math.gcd(*expert_counts(config))
        return [each for each in divisors(ranks) if each == 1 or (experts and experts % each == 0)]

    def sharding_problems(self, config: Config, degrees: Degrees) -> Iterator[Problem]:
        """Yield the numbers of experts that the degree does not divide."""
        ep = degrees.ranks(self.name)
        for experts in dict.fromkeys(expert_counts(config)):
            if experts % ep:
                text = (
                    f"must divide model.blocks.*.feed_forward.experts = {experts} ({experts} = {experts // ep} x {ep} "
                    f"+ {experts % ep}): each rank holds whole experts. Use a divisor of {experts}."
                )
                yield Problem("parallel.ep", text, ep)

    def add_sent(self, sent: "Sent", step: "RankStep") -> None:
        """Add the rows sent to experts and back, forward (again if recomputed) and backward, and their counts.

        Loads are taken to be equal; `moe/load_max` of a run is the factor to come for the rank that gets the most.
        """
        ep, model = step.degrees.ranks(self.name), step.config.model
        if ep > 1:
            rows = exchanged_bytes(step.config, step.tokens, ep)
            forward = [*step.layers, *step.recomputed]
            passes = for_layers(model, [*forward, *step.layers], rows)
            counts = [8 * each for each in expert_counts(step.config, forward)]
            large = [size * (ep - 1) // ep for size in counts if size > step.small_bytes]
            sent["all_to_all", self.name] += step.micro_batches * (sum(passes) + sum(large))


def folding_problem(degrees: Degrees, *, sharded: bool) -> str | None:
    """Return why `ep` ranks do not fold into those that may share experts; None if they do.

    `sharded`: FSDP2 shards parameters, or sums their gradients.
    """
    ep, cp, (axis, _) = degrees.ranks("ep"), degrees.cp, degrees.with_experts
    replicas = degrees.dp_replicate > 1 and (axis == "dp_shard" or (sharded and cp > 1))
    ranks = cp if replicas and axis == "dp_replicate" else degrees.ranks(*degrees.with_experts)
    name = "cp" if ranks == cp > 1 else axis if cp == 1 else f"{axis} x cp"
    if ranks % ep:
        why = "replicas do not share experts" if replicas else "these ranks share them in groups of equal size"
        whole = f"{degrees.ranks(axis)} x {cp} = {ranks}" if "x" in name else f"{ranks}"
        text = f"must divide parallel.{name} = {whole} ({ranks} = {ranks // ep} x {ep} + {ranks % ep}): {why}. "
        return f"{text}Use a divisor of {ranks}, or change {name.replace(' x ', ', ')} or the ranks."
    if ep % cp and cp % ep:
        allowed = ", ".join(str(each) for each in divisors(ranks) if each % cp == 0 or cp % each == 0)
        text = f"must divide parallel.cp = {cp} or be a multiple of it: ranks of one sequence share experts first."
        return f"{text} Use {allowed}."
    return None


def checkpointing_modes(config: Config) -> set[str]:
    """Return the modes of recomputation of the blocks with experts."""
    layers = range(config.model.num_layers)
    return {config.parallel.checkpointing_of(index) for index in layers if expert_counts(config, [index])}


def exchanged_bytes(config: Config, tokens: int, ep: int) -> Callable[[int], int]:
    """Return a function: block -> bytes that a rank sends in a pass of it over a micro-batch of `tokens`."""
    width = DTYPE_BYTES[config.precision.compute_dtype]

    def of_block(index: int) -> int:
        kind = feed_forward_of(config.model, index)
        rows = tokens * kind.per_token if isinstance(kind, MoE) else 0
        return 2 * (width * rows * config.model.hidden_size * (ep - 1) // ep)

    return of_block


def expert_counts(config: Config, layers: Iterable[int] | None = None) -> list[int]:
    """Return the number of experts of each block of `layers` that has some; None: of all blocks."""
    layers = range(config.model.num_layers) if layers is None else layers
    kinds = (feed_forward_of(config.model, index) for index in layers)
    return [kind.experts for kind in kinds if isinstance(kind, MoE)]


AXIS = ExpertAxis()
