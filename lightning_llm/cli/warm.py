"""The verb `warm`: compile the emulated casts of precision recipes in advance and cache them."""

import argparse
import math
import time
from collections.abc import Iterator

import torch

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.config.overrides import parse_overrides
from lightning_llm.config.recipes import option_files
from lightning_llm.config.schema import Config
from lightning_llm.config.sweep_space import read_sweep
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.resolve import Plan
from lightning_llm.precision.cast import kernel_cache
from lightning_llm.run.checked_plan import checked_plan, checked_resolution
from lightning_llm.run.subject import device_of
from lightning_llm.train.parallel_model import ParallelModel
from lightning_llm.train.quantization import Quantization


def warm(arguments: argparse.Namespace) -> int:
    """Compile all casts of each precision recipe by running one micro-batch; print a line per recipe and return 0.

    Recipes are those of `precision=A,B` or of --config; by default all.

    Raises:
        ConfigError: a config is invalid, or casts cannot be compiled or cached here.
    """
    if arguments.clear:
        return _clear(arguments.overrides)
    chosen = arguments.config is not None or any(
        each.key_or_group == "precision" for each in parse_overrides(arguments.overrides)
    )
    if not chosen:
        names = ",".join(option_files("precision", arguments.config_dir))
        arguments.overrides = [*arguments.overrides, f"precision={names}"]
    device = device_of(arguments.device)
    plans = list(_plans(arguments))
    if kernel_cache.folder() is None:
        raise ConfigError(
            Problem(kernel_cache.FOLDER, "cannot be used as the folder of kernels (see above). Choose another.")
        )
    width = max(len(plan.config.precision.name) for plan in plans)
    for plan in plans:
        if chosen or plan.config.precision.quantizes:
            print(f"{plan.config.precision.name:<{width}}  {_warmed(plan, device)}", flush=True)
    print(f"cached in {kernel_cache.folder()}")
    return 0


def _plans(arguments: argparse.Namespace) -> Iterator[Plan]:
    """Yield the plan of each combination of the overrides. Raises ConfigError with the problems of all."""
    if arguments.config is not None:
        yield checked_plan(arguments, to_train=False)
        return
    problems: list[Problem] = []
    for _, reading in read_sweep(arguments.overrides, arguments.config_dir):
        with gathered(problems):
            yield checked_resolution(reading, to_train=False).plan()
    if problems:
        raise ConfigError(dict.fromkeys(problems))


def _clear(overrides: list[str]) -> int:
    if overrides:
        raise ConfigError(
            Problem("--clear", "deletes the kernels of all recipes and allows no overrides. Remove them.")
        )
    path = kernel_cache.folder_path()
    print(f"removed {kernel_cache.clear():,} bytes of kernels in {path}")
    return 0


def _warmed(plan: Plan, device: torch.device) -> str:
    """Compile the casts of one recipe; return a summary."""
    config, started = plan.config, time.perf_counter()
    if not config.precision.quantizes:
        return "casts nothing"
    if plan.decision.runs == "native":
        return f"runs natively here and needs no kernels ({plan.decision.reason})"
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    quantization = Quantization(config.precision, config.seed, config.trainer.max_steps, plan.decision)
    parallel = ParallelModel.build(config, Layout(config.parallel, Degrees()), device, quantization)
    if quantization.report is not None and quantization.report.note:
        return f"nothing to compile: {quantization.report.note}"
    for step in _first_steps(config):
        _run_micro_batch(parallel, config, step, device)
    kernels = kernel_cache.tally.take() or "uses the kernels of the recipes above"
    return f"{kernels}; ready after {time.perf_counter() - started:.1f} s"


def _first_steps(config: Config) -> Iterator[int]:
    """Yield step 0, and the first step during and after each phase of the recipe."""
    steps, phases = config.trainer.max_steps, config.precision.phases
    yield 0
    for phase in phases:
        yield math.ceil(phase.start * steps)
        yield min(steps - 1, math.ceil(phase.end * steps))


def _run_micro_batch(parallel: ParallelModel, config: Config, step: int, device: torch.device) -> None:
    """Run forward and backward of one micro-batch of arbitrary tokens, as training does at `step`."""
    quantization, model = parallel.quantization, parallel.model.train()
    quantization.begin_step(model, step)
    quantization.begin_micro_batch(model, step, 0)
    tokens = torch.arange(config.data.micro_batch_size * config.data.sequence_length, device=device)
    tokens = (tokens % config.model.vocab_size).reshape(config.data.micro_batch_size, -1)
    logits = parallel.logits(tokens, None, None)
    if logits is None:
        raise RuntimeError("a model of one stage has no logits")
    parallel.loss_sum(logits, tokens).backward()
    quantization.end_micro_batch(model, lambda amax: amax)
    quantization.end_step(model, lambda amax: amax)
