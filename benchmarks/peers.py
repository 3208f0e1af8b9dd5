"""Training at one shape: our model and the peers' in the same plain loop, our `train` and transformers' Trainer."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.own_process import Turns, minima
from benchmarks.peer_models import MODELS, hugging_face
from benchmarks.rotation import Row, interleaved_minima, stepping
from benchmarks.shape import Shape, config, random_batch
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.parallel.apply import compile_blocks
from lightning_llm.plan.check import check_config
from lightning_llm.run.opening import open_rank, quiet_lightning
from lightning_llm.run.rank import train_from
from lightning_llm.run.resume.start import Start

Step = Callable[[], float]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EAGER_TARGET, COMPILED_TARGET, TRAINER_TARGET = ">= 1.2", ">= 1.15", ">= 1.2"
ROUNDS, STEPS = 5, 3


def our_step(shape: Shape, compiled: bool, dtype: torch.dtype) -> Step:
    """Return a function that makes one step of our model in the plain loop: fp32 weights, cast on use."""
    model = Decoder(config(shape=shape).model, dtype)
    initialise(model, 0)
    if compiled:
        compile_blocks(model.blocks)
    tokens, labels = random_batch(shape)
    return loop_step(model, lambda: next_token_loss_sum(model(tokens), labels) / labels.numel())


def peer_step(model: nn.Module, shape: Shape, compiled: bool, dtype: torch.dtype) -> Step:
    """Return a function that makes one step of a peer's model in a typical loop: autocast, cross-entropy."""
    tokens, labels = random_batch(shape)
    forward = torch.compile(model) if compiled else model

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = forward(tokens)
            logits = out.logits if hasattr(out, "logits") else out
            return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    return loop_step(model, loss)


def loop_step(model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> Step:
    """Return a function that makes one step of `model` with clipping and AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def peak_bytes(step: Step) -> int:
    """Return the peak bytes of live tensors in a step after the first, including those from before.

    Temporaries within our own operators are not counted: attention's blocks of scores and, on a CPU without 16-bit
    products, fp32 copies of one product's operands.
    """
    step()
    with MemTracker() as tracker:
        step()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


class _OneByOne(pl.Callback):
    """Lets our trainer make one step at a time."""

    def __init__(self, turns: Turns):
        self.turns = turns

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.turns.done()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = not self.turns.done()


def train(turns: Turns, shape: Shape, name: str, compiled: bool = False) -> None:
    """Take steps of `lightning-llm train` with default callbacks and MLflow."""
    quiet_lightning()
    words = [f"precision={name}", f"trainer.compile={str(compiled).lower()}"]
    rank = open_rank(check_config(config(*words, shape=shape)))
    train_from(replace(rank, callbacks={**rank.callbacks, "turns": _OneByOne(turns)}), Start())


def train_by_transformers(turns: Turns, shape: Shape, name: str, compiled: bool = False) -> None:
    """Take steps of transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    tokens, _ = random_batch(shape)
    data = [{"input_ids": row, "labels": row} for row in tokens] * 4000
    arguments = TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=shape.batch, bf16=name == "bf16", use_cpu=True, report_to=[],
        max_steps=4000, logging_steps=10, save_strategy="no", optim="adamw_torch_fused", disable_tqdm=True,
        torch_compile=compiled,
    )  # fmt: skip

    class OneByOne(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.done()

        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not turns.done()

        def on_log(self, *_: Any, **__: Any) -> None:
            """Keep quiet."""

    Trainer(hugging_face(shape), arguments, train_dataset=data, callbacks=[OneByOne()]).train()


def train_by_hand(turns: Turns, peer: str, shape: Shape, name: str, compiled: bool = False) -> None:
    """Take steps of a peer's model in the plain loop."""
    model = MODELS[peer](shape)
    if isinstance(model, str):
        raise ValueError(model)
    step = peer_step(model, shape, compiled, DTYPES[name])
    while turns.done():
        step()


def measure(shape: Shape) -> Iterator[Row]:
    """Yield per dtype the tokens/s of each contender, and our ratios to the fastest and the leanest of the others."""
    for name, dtype in DTYPES.items():
        yield from _loops(shape, name, dtype)
        yield from _trainers(shape, name)


def _loops(shape: Shape, name: str, dtype: torch.dtype) -> Iterator[Row]:
    theirs: dict[str, tuple[Step, Step]] = {}
    for peer, made in MODELS.items():
        model = made(shape)
        if isinstance(model, str):
            yield f"{peer}, {name}, tokens/s", None, model
        else:
            theirs[peer] = tuple(peer_step(model, shape, compiled, dtype) for compiled in (False, True))  # type: ignore[assignment]
    ours = tuple(our_step(shape, compiled, dtype) for compiled in (False, True))
    peaks = {peer: peak_bytes(eager) for peer, (eager, _) in theirs.items()}
    for index, (how, target) in enumerate([("eager", EAGER_TARGET), ("compiled", COMPILED_TARGET)]):
        contenders = {peer: stepping(steps[index]) for peer, steps in theirs.items()} | {"ours": stepping(ours[index])}
        best = interleaved_minima(contenders, ROUNDS, STEPS)
        for each, seconds in best.items():
            yield f"{each}, {name}, {how}, tokens/s", shape.tokens / seconds, ""
        yield f"ours over the fastest, {name}, {how}", min(best[each] for each in theirs) / best["ours"], target
    yield f"peak bytes of ours over the leanest's, {name}, eager", peak_bytes(ours[0]) / min(peaks.values()), "<= 1"


def _trainers(shape: Shape, name: str) -> Iterator[Row]:
    """Programs as a user starts them: `train`, the others' loops and Trainer, each in a separate process."""
    from transformers.utils import is_accelerate_available

    there = [peer for peer, made in MODELS.items() if not isinstance(made(shape), str)]
    has_trainer = is_accelerate_available()
    if not has_trainer:
        why = "not measured: accelerate is not installed (pip install -e '.[bench]')"
        yield f"transformers' Trainer, {name}, tokens/s", None, why
    for how, target in (("eager", EAGER_TARGET), ("compiled", COMPILED_TARGET)):
        compiled, ending = how == "compiled", f"{name}, {how}" if how == "compiled" else name
        others: dict[str, tuple[Any, ...]] = {
            f"{peer} in its process": (train_by_hand, peer, shape, name, compiled) for peer in there
        }
        if has_trainer:
            others["transformers' Trainer"] = (train_by_transformers, shape, name, compiled)
        best = minima({"train": (train, shape, name, compiled), **others}, ROUNDS, STEPS)
        for each, seconds in best.items():
            yield f"{each}, {ending}, tokens/s", shape.tokens / seconds, ""
        if has_trainer:
            over = best["transformers' Trainer"] / best["train"]
            yield f"train over transformers' Trainer, {ending}", over, COMPILED_TARGET if compiled else TRAINER_TARGET
        yield f"train over the fastest of all, {ending}", min(best[each] for each in others) / best["train"], target
