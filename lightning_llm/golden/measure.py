"""Run the first steps of a recipe on one rank as `train` does, and measure them. No run folder remains.

Measured are loss, learning rate, and the gradient norm of every parameter.
"""

import math
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_llm.base.hardware import describe_device
from lightning_llm.base.host_memory import give_back
from lightning_llm.base.keyed_hash import MASK_32, hash_words
from lightning_llm.config.config_hash import is_observer
from lightning_llm.golden.curve import Measured, StepFigures
from lightning_llm.linalg import local
from lightning_llm.parallel.grad_norm import parameter_gradient_norms
from lightning_llm.plan.report import plan_line
from lightning_llm.plan.resolve import Plan
from lightning_llm.precision.cast.random_bits import mix
from lightning_llm.run.agreement import fingerprint, origin_here, run_facts
from lightning_llm.run.fit import attention_of, build_module, build_trainer
from lightning_llm.run.inputs import open_inputs
from lightning_llm.run.launch.environment import print_once
from lightning_llm.run.opening import Rank, open_rank, quiet_lightning
from lightning_llm.run.resume.start import Start
from lightning_llm.tracking.provenance import FINGERPRINT, origin_of
from lightning_llm.train.checkpoint.checkpointing import Checkpointing, Superseding
from lightning_llm.train.endings import FailStalledRun
from lightning_llm.train.module import CorpusDataModule
from lightning_llm.train.run_folder import RunFolder
from lightning_llm.train.spikes import StepNotMadeError

WRITERS = (RunFolder, Checkpointing, Superseding, FailStalledRun)
"""The callbacks that write files."""
FP32_ROUNDING = 2.0**-24
"""Half a unit in the last place: the largest relative error of rounding to fp32."""


def measure(plan: Plan, steps: int, nudge: int | None = None) -> Measured:
    """Run the first `steps` steps of `plan` on this rank and return their numbers. Collective.

    The schedule and the data are those of the whole run. Callbacks that only observe are left out. All output goes to
    stderr. `nudge`: change the initial weights by a rounding error before the first step (`nudge_weights`); None: do
    not.

    Raises:
        ConfigError: `train` would reject the plan.
        StepNotMadeError: the loss or the gradient norm is not finite, spikes.policy ends the run, or a callback ends it
            before its first step.
    """
    threads = torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory(prefix="lightning-llm-golden-") as folder, redirect_stdout(sys.stderr):
            quiet_lightning()
            return _first_steps(open_rank(_without_observers(plan, Path(folder, "run"))), steps, nudge)
    finally:
        torch.set_num_threads(threads)  # the caller continues
        give_back()


def _without_observers(plan: Plan, folder: Path) -> Plan:
    config = plan.config
    acting = {name: node for name, node in config.callbacks.items() if node and not is_observer(node)}
    run = config.run.model_copy(update={"dir": str(folder)})
    return replace(plan, config=config.model_copy(update={"callbacks": acting, "run": run}))


def _first_steps(rank: Rank, steps: int, nudge: int | None) -> Measured:
    config, start = rank.plan.config, Start()
    print_once(plan_line(rank.plan, describe_device(rank.device)))
    inputs = open_inputs(config, start, rank.device)
    facts = run_facts(config, inputs.corpus, rank.plan.decision) | inputs.facts
    facts |= {FINGERPRINT: fingerprint(rank.device)}
    module = build_module(rank.plan, inputs.corpus, inputs.initial, inputs.distillation)
    trainer = build_trainer(rank.plan, rank.device, rank.layout, start, [], chosen=rank.callbacks)
    trajectory = Trajectory(min(steps, config.trainer.max_steps), nudge)
    trainer.callbacks[:] = [*(each for each in trainer.callbacks if not isinstance(each, WRITERS)), trajectory]
    trainer.limit_val_batches = 0  # validations have no part in the steps
    with attention_of(rank.plan, rank.attention):
        trainer.fit(module, CorpusDataModule(inputs.corpus, config))
    if not trajectory.figures:
        raise StepNotMadeError("a callback ended the run before its first step, so there is nothing to record", {})
    return Measured(trajectory.figures, origin_of(origin_here(rank.plan, rank.device) | facts))


class Trajectory(pl.Callback):
    """Callback that records the first `steps` steps in `figures` and then ends the run.

    It must come after all callbacks that change gradients. `nudge`: number for `nudge_weights`, which runs before the
    first step; None: the weights stay as they are.
    """

    def __init__(self, steps: int, nudge: int | None = None):
        self.steps = steps
        self.nudge = nudge
        self.figures: list[StepFigures] = []
        self._norms: dict[str, float] = {}
        self._loss_scale = 1.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.nudge is not None:
            nudge_weights(pl_module.model, self.nudge)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        named = dict(pl_module.model.named_parameters())
        elsewhere = {id(parameter) for parameter in pl_module.copied_parameters}
        own = {name: parameter for name, parameter in named.items() if id(parameter) not in elsewhere}
        self._norms = parameter_gradient_norms(own, trainer.strategy.layout)
        self._loss_scale = pl_module.scaler.scale  # the step may change it before it ends

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        record, scale = pl_module.step_record, self._loss_scale
        norms = {name: self._norms[name] / scale for name in sorted(self._norms, key=_depth)}
        figures = record["step"], record["loss"], record["grad_norm"], record["lr"], norms, scale
        self.figures.append(StepFigures(*figures))
        if len(self.figures) == self.steps:
            trainer.should_stop = True


def _depth(name: str) -> float:
    """Return the parameter's place in the forward pass: stages of an interleaved pipeline have alternate layers."""
    if name.startswith("layers."):
        return int(name.split(".")[1])
    return -1 if "embedding" in name else float("inf")


@torch.no_grad()
def nudge_weights(model: nn.Module, number: int) -> None:
    """Change every weight by a rounding error: by sqrt(K) 2^-24 of it, at least to the next number of its dtype.

    K is the number of products in a sum over its last axis. A sum of K products in fp32 has an error of about
    sqrt(K) 2^-24 in any order (N. J. Higham and T. Mary, "A new approach to probabilistic rounding error analysis",
    SIAM J. Sci. Comput. 41 (2019) A2815-A2835), the typical distance between kernels with different orders. Replacing
    rounding errors by such an initial change, and judging a port by its growth, is the method of J. M. Rosinski and
    D. L. Williamson, "The accumulation of rounding errors and port validation for global atmospheric models", SIAM J.
    Sci. Comput. 18 (1997) 552-564. The direction follows from a weight's bits and `number`, so it is the same on all
    ranks with a copy of the weight.
    """
    for parameter in model.parameters():
        shard: Tensor = local(parameter)
        bits = shard.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[shard.element_size()])
        up = mix((bits.to(torch.int64) + hash_words(number)) & MASK_32) & 1
        sign = up * 2.0 - 1  # of +-1, fp32
        terms = parameter.shape[-1] if parameter.dim() else 1
        moved = (shard.double() * (1 + sign * math.sqrt(terms) * FP32_ROUNDING)).to(shard.dtype)
        neighbour = torch.nextafter(shard, (sign * torch.inf).to(shard.dtype))
        shard.copy_(torch.where(moved == shard, neighbour, moved))
