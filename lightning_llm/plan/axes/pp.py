"""Pipeline parallelism: ranks that each have some of the layers. Imports no torch."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.model import DEFAULT_LAYERS
from lightning_llm.model.structure import feed_forward_of
from lightning_llm.optim.kinds import DTYPE_BYTES
from lightning_llm.plan.axes.axis import Dimension, MeshAxis, divisors
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.memory.units import micro_batches_per_rank
from lightning_llm.plan.stages import INTERLEAVED

if TYPE_CHECKING:
    from lightning_llm.plan.traffic import RankStep, Sent

ZERO_BUBBLE = ("interleaved_zero_bubble", "zbv_zero_bubble")


class PipelineAxis(MeshAxis):
    """Axis of a pipeline's ranks, each with one or several stages (`plan.stages`)."""

    name: ClassVar[str] = "pp"
    cuts: ClassVar[tuple[Dimension, ...]] = ("layers",)

    def search_degrees(self, config: Config, ranks: int) -> Sequence[int]:
        """Return the divisors of `ranks` that leave each rank a layer."""
        return [each for each in divisors(ranks) if each <= config.model.num_layers]

    def layout_problems(self, config: Config, degrees: Degrees, fits: bool) -> Iterator[Problem]:
        """Yield why the model, the batch or the schedule does not fit the pipeline, with the arithmetic."""
        parallel = config.parallel
        if parallel.schedule in ZERO_BUBBLE:
            text = (
                f"is {parallel.schedule}. Zero-bubble schedules run a backward pass in two parts and a "
                "custom autograd function (loss, attention, quantised linears) twice, which doubles its gradients; "
                "compiled blocks fail. Set 1f1b or interleaved_1f1b."
            )
            yield Problem("parallel.schedule", text)
        elif fits:
            yield from _stage_problems(config, degrees)

    def add_sent(self, sent: "Sent", step: "RankStep") -> None:
        """Add hidden states sent forward, their gradients sent back, and a tied embedding's gradient once per step."""
        model, degrees, parts = step.config.model, step.degrees, step.parts
        neighbours = sum(2 - part.first - part.last for part in parts)
        sent["send", "pp"] += step.micro_batches * step.boundary_bytes * neighbours
        if degrees.pp > 1 and model.tie_embeddings and (parts[0].first or parts[-1].last):
            table = model.padded_vocab_size // degrees.width * model.hidden_size
            sent["send", "pp"] += DTYPE_BYTES[step.config.precision.main_grad_dtype] * table // step.shard_ranks


def _stage_problems(config: Config, degrees: Degrees) -> Iterator[Problem]:
    parallel, pp = config.parallel, degrees.pp
    if parallel.virtual_stages > 1 and (pp == 1 or parallel.schedule != INTERLEAVED):
        why = f"and parallel.schedule={parallel.schedule} has one stage per rank" if pp > 1 else "and parallel.pp is 1"
        text = f"is {parallel.virtual_stages}, {why}. Set it to 1, or set pp above 1 and schedule={INTERLEAVED}."
        yield Problem("parallel.virtual_stages", text)
    if pp == 1:
        return
    if parallel.schedule == INTERLEAVED and parallel.virtual_stages == 1:
        text = f"is 1, and schedule={INTERLEAVED} needs several stages per rank. Set it to 2 or more, or schedule=1f1b."
        yield Problem("parallel.virtual_stages", text)
    model = config.model
    for name in dict.fromkeys(model.layer_name(index) for index in range(model.num_layers)):
        index = (model.layers or DEFAULT_LAYERS).index(name)
        if feed_forward_of(model, index).state_taken(model):
            text = (
                f"is {pp}, and the router of '{name}' in model.layers takes the state of the block before "
                "(depth_mixing), which stages do not send. Set 1, and split weights or experts (parallel.dp_shard, ep)."
            )
            yield Problem("parallel.pp", text)
    stages = pp * parallel.virtual_stages
    if config.model.num_layers < stages:
        text = (
            f"is {config.model.num_layers}, and pp={pp} x virtual_stages={parallel.virtual_stages} makes {stages} "
            "stages of at least one layer. Lower one of them, or use a deeper model."
        )
        yield Problem("model.num_layers", text)
    yield from _micro_batch_problems(config, degrees)


def _micro_batch_problems(config: Config, degrees: Degrees) -> Iterator[Problem]:
    data, pp, schedule = config.data, degrees.pp, config.parallel.schedule
    count = micro_batches_per_rank(config, degrees)
    arithmetic = (
        f"{count} micro-batches per rank and step (global_batch_size={data.global_batch_size} / (micro_batch_size="
        f"{data.micro_batch_size} x dp={degrees.dp}))"
    )
    if schedule == "1f1b" and count < pp:
        text = f"gives {arithmetic}; 1f1b needs at least pp={pp}. Raise it, lower micro_batch_size, or use gpipe."
        yield Problem("data.global_batch_size", text)
    if schedule == INTERLEAVED and count % pp:
        text = (
            f"gives {arithmetic}; {INTERLEAVED} needs a multiple of pp={pp}. Set it to a multiple of "
            f"{data.micro_batch_size * degrees.dp * pp}, or use 1f1b."
        )
        yield Problem("data.global_batch_size", text)


AXIS = PipelineAxis()
