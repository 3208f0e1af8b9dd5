"""One run within a group of ranks, and all that must not depend on the layout."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from filelock import FileLock
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_llm.config.schema import Config, ParallelConfig
from lightning_llm.data.opening import open_corpus
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.check import check_config
from lightning_llm.plan.degrees import resolve_degrees
from lightning_llm.run.agreement import prepare_folder
from lightning_llm.run.fit import build_module, build_trainer
from lightning_llm.run.inputs import open_initial, open_teachers
from lightning_llm.run.opening import open_layout, quiet_lightning
from lightning_llm.run.rank import decide_with_ranks
from lightning_llm.train.checkpoint.checkpointing import Checkpointing
from lightning_llm.train.module import CorpusDataModule
from tests.run_metrics import curve

Trace = dict[str, Any]


class Gradients(pl.Callback):
    """Keeps the first steps' gradients, whole, as the hook finds them: not yet clipped, and times the loss scale."""

    def __init__(self, steps: int):
        self.steps = steps
        self.kept: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if len(self.kept) < self.steps:
            named = ((name, each) for name, each in pl_module.model.named_parameters() if each.requires_grad)
            gradients = {name: whole(parameter.grad) for name, parameter in named}
            self.kept.append(of_all_stages(gradients, trainer.strategy.layout))


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor, gathered over its shards."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def of_all_stages(tensors: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """Return the tensors of all pipeline stages by name; those that two stages have must be the same bits."""
    whole: dict[str, Tensor] = {}
    for part in layout.gather_over_stages(tensors):
        for name, tensor in part.items():
            if name in whole and not torch.equal(whole[name], tensor):
                raise AssertionError(f"{name} differs between stages")
            whole[name] = tensor
    return whole


def run_with(config: Config, *callbacks: pl.Callback, saves: bool = True) -> pl.Trainer:
    """Train as `lightning-llm train` does on one of its ranks, with more callbacks before its own.

    `saves=False`: without the one that saves, a tenth of a run of two steps.
    """
    plan = check_config(config)
    config = plan.config
    quiet_lightning()
    device = torch.device("cpu")
    layout = open_layout(plan, device)
    locks: list[FileLock] = []
    start = decide_with_ranks(config, locks)
    corpus = open_corpus(config.data, config.seed, config.model.vocab_size)
    adopt = prepare_folder(config, corpus, start)
    initial, _ = open_initial(config, start, corpus.tokenizer.path)
    distillation, _ = open_teachers(config, start, corpus.tokenizer, device)
    module = build_module(plan, corpus, initial, distillation)
    trainer = build_trainer(plan, device, layout, start, [], adopt=adopt)
    kept = [each for each in trainer.callbacks if saves or not isinstance(each, Checkpointing)]
    trainer.callbacks[:] = [*callbacks, *kept]
    trainer.fit(module, CorpusDataModule(corpus, config))
    for each in locks:
        each.release()
    return trainer


def layout_here(parallel: ParallelConfig, ranks_per_node: int | None = None) -> Layout:
    """Return this rank's layout, of all ranks that were started."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return Layout.from_config(parallel, resolve_degrees(parallel, world), torch.device("cpu"), ranks_per_node)


def traced_run(config: Config, *callbacks: pl.Callback, saves: bool = True) -> Trace:
    """Return the curve (rank 0 has it), the first two steps' gradients and the last parameters of a run."""
    gradients = Gradients(steps=2)
    trainer = run_with(config, *callbacks, gradients, saves=saves)
    model = trainer.lightning_module.model
    return {
        "curve": curve(Path(config.run.dir)) if torch.distributed.get_rank() == 0 else None,
        "gradients": gradients.kept,
        "parameters": of_all_stages(
            {name: whole(parameter) for name, parameter in model.named_parameters()}, trainer.strategy.layout
        ),
    }


def unsaved_run(config: Config) -> Trace:
    """Return the trace of `traced_run` without saving checkpoints; test_resume_layouts.py tests those."""
    return traced_run(config, saves=False)


def difference(one: Trace, other: Trace) -> str | None:
    """Return the first thing that is not the same bits, None if everything is."""
    for ours, theirs in zip(one["curve"], other["curve"], strict=True):
        if ours != theirs:
            return f"curve: {ours} is not {theirs}"
    for step, (ours, theirs) in enumerate(zip(one["gradients"], other["gradients"], strict=True)):
        for name, gradient in ours.items():
            if not torch.equal(gradient, theirs[name]):
                return f"gradient of {name} at step {step + 1}"
    for name, parameter in one["parameters"].items():
        if not torch.equal(parameter, other["parameters"][name]):
            return f"parameter {name}"
    return None
