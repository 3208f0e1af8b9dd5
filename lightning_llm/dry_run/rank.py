"""Training step of one fake rank: the real training code on fake tensors and a fake process group."""

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_llm.config.schema import Config
from lightning_llm.data.corpus import Batch
from lightning_llm.dry_run.counting import Counting
from lightning_llm.linalg import DTYPES, local
from lightning_llm.linalg.gemm import unwidened
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.ensemble import Ensemble
from lightning_llm.model.loss import chunked_for
from lightning_llm.model.weights.load import frozen
from lightning_llm.optim.optimizer import initialise_state
from lightning_llm.parallel.apply import InitialSlice, materialise
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.torch_private import private
from lightning_llm.plan.memory.activations import on_gpu
from lightning_llm.plan.nodes import ranks_per_node
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.teachers import teacher_models
from lightning_llm.plan.traffic import small_bytes
from lightning_llm.precision.cast.inductor import Backend
from lightning_llm.train.distillation import Distillation
from lightning_llm.train.parallel_model import ParallelModel
from lightning_llm.train.quantization import LossScaler, Quantization
from lightning_llm.train.spikes import SpikePolicy
from lightning_llm.train.step import TrainState, TrainStep

CPU = torch.device("cpu")


@dataclass(frozen=True)
class RankCounts:
    """Counts of memory, traffic and operations of one rank in one step."""

    rank: int
    pp_rank: int
    parameters_bytes: int
    gradients_bytes: int
    """Measured between reduction and update."""
    optimizer_bytes: int
    peak_bytes: int
    """Peak of all live bytes during the step."""
    sent_bytes: dict[str, int]
    """Bytes sent by kind of collective, as in a ring."""
    calls: dict[str, int]
    """Number of collectives by kind."""
    between: list[tuple[str, tuple[int, ...], int]] = field(repr=False)
    """(kind, ranks, bytes sent) for every kind of collective and set of ranks."""
    operations: int
    host_waits: int
    """Number of times the host waited for a value."""
    cpu_seconds: float


def dry_rank(plan: Plan, rank: int, progress: Callable[[], None] | None = None) -> RankCounts:
    """Run the first step of `plan` as global rank `rank` on fake tensors; return its counts.

    It joins a fake process group, so call it once per process. Casts only allocate their results, and blocks are not
    compiled. `progress` is called when a stage of the rank begins a micro-batch.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    gc.freeze()  # keep the garbage collector from scanning imported objects
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.degrees.world)
    parallel = plan.config.parallel.model_copy(update={"compile": False})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Set timeout is now only supported")  # there are no peers to wait for
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")  # not written to
        layout = Layout.from_config(parallel, plan.degrees, CPU, ranks_per_node(plan.config))
        return count_step(plan, layout, FakeTensorMode(allow_non_fake_inputs=True), progress)


def count_step(
    plan: Plan,
    layout: Layout,
    fake: FakeTensorMode | None,
    progress: Callable[[], None] | None = None,
    device: torch.device = CPU,
    casts: Backend = "shapes",
) -> RankCounts:
    """Run the first step of `plan` as this rank of `layout` and count; return the counts.

    Args:
        plan: the plan.
        layout: layout of this rank, on a fake or a real process group.
        fake: mode of fake tensors; None: real tensors.
        progress: called when a stage of this rank begins a micro-batch.
        device: device of the tensors.
        casts: implementation of casts; "shapes" only allocates their results.
    """
    started = time.process_time()
    config, within = plan.config, fake or nullcontext()
    counting = Counting(small_bytes(config))

    def fill(stage: Decoder, seed: int, device: torch.device, initial: InitialSlice | None) -> None:
        with within, counting.following():
            if fake is None:
                materialise(stage, seed, device, initial)
            else:
                stage.to_empty(device=device)

    def measure_gradients(loss: Tensor) -> None:
        gradients.append(_bytes([p.grad for p in parallel.model.parameters() if p.grad is not None]))

    quantization = Quantization(config.precision, config.seed, config.trainer.max_steps, backend=casts)
    if progress is not None:
        _tell_micro_batches(quantization, progress)
    parallel = ParallelModel.build(config, layout, device, quantization, fill=fill)
    decoders, gradients = _teachers(config), list[int]()
    with within, counting.following(), unwidened():
        scaler, spikes = LossScaler(config.precision.loss_scaling), SpikePolicy(config.spikes)
        state = TrainState(config.data.global_batch_size * config.data.sequence_length)
        quantization.watch_overflow(parallel.model)
        teacher_decoders = [each.to_empty(device=device) for each in decoders]
        teachers = None if config.distil is None else _distillation(config, teacher_decoders)
        step = TrainStep.build(config, parallel, state, scaler, spikes, lambda _: None, [measure_gradients], teachers)
        initialise_state(step.optimizer)
        batch = _batch(config, plan.micro_batches, device)
        parallel.model.train()
        counting.begin()
        planned_for = "cuda" if fake and on_gpu(plan) else "cpu"
        with sends_held() if fake else nullcontext(), chunked_for(planned_for):
            step(batch)
    return _counts(counting, layout, step, gradients[0], time.process_time() - started)


def _counts(
    counting: Counting, layout: Layout, step: TrainStep, gradients_bytes: int, cpu_seconds: float
) -> RankCounts:
    """Return the counts of this rank after `step`."""
    return RankCounts(
        rank=layout.rank,
        pp_rank=layout.coordinates.pp,
        parameters_bytes=_bytes(list(step.parallel.model.parameters())),
        gradients_bytes=gradients_bytes,
        optimizer_bytes=_bytes([*_moments(step.optimizer), *step.algorithm.tensors().values()]),
        peak_bytes=counting.held.peak_bytes,
        sent_bytes=counting.sent.by_kind(counting.sent.bytes),
        calls=counting.sent.by_kind(counting.sent.calls),
        between=[(kind, ranks, size) for (kind, ranks), size in counting.sent.bytes.items()],
        operations=counting.operations,
        host_waits=counting.host_waits,
        cpu_seconds=cpu_seconds,
    )


def _tell_micro_batches(quantization: Quantization, progress: Callable[[], None]) -> None:
    """Call `progress` when a stage first begins a micro-batch, not when it recomputes it."""
    begin, begun = quantization.begin_micro_batch, set[tuple[int, int]]()

    def begin_micro_batch(model: nn.Module, step: int, micro_batch: int, at_once: Sequence[int] = ()) -> None:
        if (key := (id(model), micro_batch)) not in begun:
            begun.add(key)
            progress()
        begin(model, step, micro_batch, at_once)

    quantization.begin_micro_batch = begin_micro_batch  # type: ignore[method-assign]


def _teachers(config: Config) -> list[Decoder]:
    """Return decoders with the teachers' shapes, on the meta device."""
    dtype = DTYPES[config.precision.compute_dtype]
    with torch.device("meta"):
        return [frozen(Decoder(model, dtype), dtype) for model in teacher_models(config)]


def _distillation(config: Config, decoders: Sequence[Decoder]) -> Distillation:
    if config.distil is None:
        raise ValueError("there are no teachers")
    return Distillation(config.distil, Ensemble.from_members(decoders, config.distil.combine), config.model.vocab_size)


def _moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = optimizer.state.values()
    return [value for each in states for key, value in each.items() if isinstance(value, Tensor) and key != "step"]


def _batch(config: Config, micro_batches: int, device: torch.device) -> Batch:
    shape = micro_batches, config.data.micro_batch_size, config.data.sequence_length
    tokens, labels, documents = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(3))
    return Batch(tokens, labels, documents if config.data.document_mask else None)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(local(tensor.detach()).nbytes for tensor in tensors)


class _Sending:
    """A send in flight that keeps its tensor alive while referenced, as gloo's works do."""

    def __init__(self, work: Any, tensor: Tensor):
        self._work, self._tensor = work, tensor

    def wait(self, *args: Any) -> Any:
        return self._work.wait(*args)

    def is_completed(self) -> Any:
        return self._work.is_completed()


@contextmanager
def sends_held() -> Iterator[None]:
    """Context in which `dist.isend` keeps a tensor alive until its send is dropped, as gloo does, to count memory."""
    whole = private(dist, "isend")

    @wraps(whole)
    def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _Sending(whole(tensor, *args, **kwargs), tensor)

    owners: tuple[Any, ...] = dist, dist.distributed_c10d
    for owner in owners:
        owner.isend = isend
    try:
        yield
    finally:
        for owner in owners:
            owner.isend = whole
