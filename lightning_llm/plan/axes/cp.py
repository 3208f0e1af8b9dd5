"""Context parallelism: ranks that each have a part of a sequence's tokens. Imports no torch."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.model import DEFAULT_LAYERS
from lightning_llm.model.experts.kinds import MoE
from lightning_llm.model.spec import LinearSpec
from lightning_llm.model.structure import feed_forward_of, for_layers, mixer_of
from lightning_llm.optim.kinds import DTYPE_BYTES
from lightning_llm.plan.axes.axis import Dimension, MeshAxis, divisors
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.divisibility import ShardedAxis
from lightning_llm.plan.memory.units import uses_fsdp

if TYPE_CHECKING:
    from lightning_llm.plan.traffic import RankStep, Sent


LEAST_TOKENS = 2048
"""Minimum tokens of a sequence per rank in a search; shorter parts make inefficient GEMMs and attention."""


class ContextAxis(MeshAxis):
    """Axis of ranks that share sequences and parameters; under FSDP2 they shard the parameters, too."""

    name: ClassVar[str] = "cp"
    cuts: ClassVar[tuple[Dimension, ...]] = ("parameters", "sequence")
    on_ranks: ClassVar[str] = "lightning_llm.parallel.cp:ContextParallel"

    def search_degrees(self, config: Config, ranks: int) -> Sequence[int]:
        """Return the divisors of `ranks` that leave each rank `LEAST_TOKENS` of a sequence."""
        length = config.data.sequence_length
        return [each for each in divisors(ranks) if each == 1 or length // each >= LEAST_TOKENS]

    def sharding_problems(self, config: Config, degrees: Degrees) -> Iterator[Problem]:
        """Yield a problem if a pipeline or mixer needs whole sequences, or they have no two chunks per rank."""
        cp, model, length = degrees.cp, config.model, config.data.sequence_length
        if cp == 1:
            return
        if degrees.pp > 1:
            yield Problem(
                "parallel.cp",
                f"is {cp} with pp={degrees.pp}; stages need whole sequences. Set one of them to 1.",
            )
        mixers = for_layers(model, range(model.num_layers), lambda index: mixer_of(model, index))
        names = [model.layer_name(index) for index, mixer in enumerate(mixers) if not mixer.context_parallel]
        for name in dict.fromkeys(names):
            text = (
                f"is {cp}, and the mixer of '{name}' in model.layers needs whole sequences. Set 1, and split "
                "weights, heads or layers instead (parallel.dp_shard, tp, pp)."
            )
            yield Problem("parallel.cp", text)
        for index in range(len(model.layers or DEFAULT_LAYERS)):
            if not feed_forward_of(model, index).context_parallel:
                text = (
                    f"is {cp}, and the feed-forward network of '{model.layer_name(index)}' in model.layers needs whole "
                    "sequences. Set 1, and split weights or layers instead (parallel.dp_shard, tp, pp)."
                )
                yield Problem("parallel.cp", text)
        if length % (2 * cp):
            text = f"is {length}, and cp={cp} splits sequences into 2 x {cp} chunks. Use a multiple of {2 * cp}."
            yield Problem("data.sequence_length", text)

    def cut_operands(
        self, operand: str, linears: list[LinearSpec], config: Config, degrees: Degrees
    ) -> Iterator[tuple[int, ShardedAxis]]:
        # Rows of experts are filled up to whole blocks, however many tokens a rank has.
        if degrees.cp > 1 and operand != "w" and any(linear.role != "expert" for linear in linears):
            length = config.data.sequence_length
            yield 0, ShardedAxis("a sequence (two per rank)", length, 2 * degrees.cp, "cp", "data.sequence_length")

    def add_sent(self, sent: "Sent", step: "RankStep") -> None:
        """Add the keys and values gathered in the forward pass (again if recomputed), and their gradients."""
        config, cp, model = step.config, step.degrees.cp, step.config.model
        if cp == 1:
            return
        per_element = DTYPE_BYTES[config.precision.compute_dtype] * step.tokens * (cp - 1)

        def gathered(index: int) -> int:
            return per_element * mixer_of(model, index).context_elements(model, step.degrees.width)

        forward = for_layers(model, [*step.layers, *step.recomputed], gathered)
        sent["all_gather", "cp"] += step.micro_batches * sum(forward)
        sent["reduce_scatter", "cp"] += step.micro_batches * sum(for_layers(model, step.layers, gathered))
        if not uses_fsdp(config.parallel, step.degrees):
            sent["all_reduce", "cp"] += 2 * step.gradient_bytes * (cp - 1) // cp
            ecp = step.degrees.ecp
            sent["all_reduce", "ecp"] += 2 * step.expert_gradient_bytes * (ecp - 1) // ecp
        for kind in for_layers(model, [*step.layers, *step.recomputed], lambda index: feed_forward_of(model, index)):
            if isinstance(kind, MoE):
                counts, choices = kind.counted_bytes(config.precision.compute_dtype == "fp64")
                sent["all_gather", "cp"] += step.micro_batches * choices * step.tokens * (cp - 1)
                if counts > step.small_bytes:
                    sent["all_reduce", "cp"] += step.micro_batches * (2 * counts * (cp - 1) // cp)

    def order_problem(self, degrees: Degrees) -> str | None:
        return f"cp={degrees.cp} changes the order of sums within a micro-batch"


AXIS = ContextAxis()
