"""The first steps of a recipe, made as `train` makes them, and nothing left behind: one rank of them."""

import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch

from lightning_llm.base.hardware import describe_device
from lightning_llm.config.config_hash import is_observer
from lightning_llm.data.opening import open_corpus
from lightning_llm.golden.figures import Measured
from lightning_llm.golden.trajectory import Trajectory
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.text.report import plan_line
from lightning_llm.run.agreement import agree_on_data
from lightning_llm.run.attention_kernel import attention_of
from lightning_llm.run.build import build_module, build_trainer
from lightning_llm.run.facts import origin_here, run_facts
from lightning_llm.run.fingerprint import fingerprint
from lightning_llm.run.host_memory import give_back
from lightning_llm.run.launch.environment import is_first_rank, say
from lightning_llm.run.prepared_rank import Rank, prepare_rank, quiet_lightning
from lightning_llm.run.resume.initial import open_initial
from lightning_llm.run.resume.start import Start
from lightning_llm.run.teachers import open_teachers
from lightning_llm.tracking.provenance import FINGERPRINT, origin_of
from lightning_llm.train.checkpoint.checkpointing import Checkpointing, Superseding
from lightning_llm.train.datamodule import CorpusDataModule
from lightning_llm.train.run_folder import RunFolder
from lightning_llm.train.spikes.nonfinite import StepNotMadeError
from lightning_llm.train.spikes.stalled_run import FailStalledRun

WRITERS = (RunFolder, Checkpointing, Superseding, FailStalledRun)
"""The callbacks that leave files."""


def measure(plan: Plan, steps: int, nudge: int | None = None) -> Measured:
    """Make the first `steps` steps of `plan` on this rank, without its observers and its folder. Collective.

    The schedule and the data are those of the whole run. What a run prints goes to stderr. `nudge`: begin with other
    weights, see `nudge_weights`.

    Raises:
        ConfigError: what `train` refuses.
        StepNotMadeError: the loss or the gradient norm is not finite, spikes.policy ends the run, or a callback before
            its first step.
    """
    threads = torch.get_num_threads()
    try:
        with tempfile.TemporaryDirectory(prefix="lightning-llm-golden-") as folder, redirect_stdout(sys.stderr):
            quiet_lightning()
            return _first_steps(prepare_rank(_without_observers(plan, Path(folder, "run"))), steps, nudge)
    finally:
        torch.set_num_threads(threads)  # whoever calls this goes on
        give_back()


def _without_observers(plan: Plan, folder: Path) -> Plan:
    config = plan.config
    acting = {name: node for name, node in config.callbacks.items() if node and not is_observer(node)}
    run = config.run.model_copy(update={"dir": str(folder)})
    return replace(plan, config=config.model_copy(update={"callbacks": acting, "run": run}))


def _first_steps(rank: Rank, steps: int, nudge: int | None) -> Measured:
    config, start = rank.plan.config, Start()
    say(plan_line(rank.plan, describe_device(rank.device)))
    corpus = open_corpus(
        config.data, config.seed, config.model.vocab_size, config.trainer.max_steps, progress=is_first_rank()
    )
    agree_on_data(corpus.fingerprint, start)
    initial, init_facts = open_initial(config, start, corpus.tokenizer.path)
    distillation, teacher_facts = open_teachers(config, start, corpus.tokenizer, rank.device)
    facts = run_facts(config, corpus, rank.plan.decision) | init_facts | teacher_facts
    facts |= {FINGERPRINT: fingerprint(rank.device)}
    module = build_module(rank.plan, corpus, initial, distillation)
    trainer = build_trainer(rank.plan, rank.device, rank.layout, start, [], chosen=rank.callbacks)
    trajectory = Trajectory(min(steps, config.trainer.max_steps), nudge)
    trainer.callbacks[:] = [*(each for each in trainer.callbacks if not isinstance(each, WRITERS)), trajectory]
    trainer.limit_val_batches = 0  # validations have no part in the steps
    with attention_of(rank.plan, rank.attention):
        trainer.fit(module, CorpusDataModule(corpus, config))
    if not trajectory.figures:
        raise StepNotMadeError("a callback ended the run before its first step, and there is nothing to record", {})
    return Measured(trajectory.figures, origin_of(origin_here(rank.plan, rank.device) | facts))
