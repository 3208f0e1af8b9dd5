"""Build the LightningModule and the Trainer with its callbacks from a plan."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_llm.config.config_hash import config_digest, flatten, frozen_values
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import same_folder
from lightning_llm.data.corpus import Corpus
from lightning_llm.model.attention.kernel_choice import FLEX, attention_by
from lightning_llm.parallel.apply import InitialSlice
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.resolve import Plan
from lightning_llm.run.launch.environment import rank_environment
from lightning_llm.run.opening import build_callbacks
from lightning_llm.run.resume.start import Start
from lightning_llm.tracking.chain import RECORDS
from lightning_llm.train.checkpoint.checkpointing import Checkpointing, Superseding
from lightning_llm.train.checkpoint.manifest import FROZEN_CONFIG
from lightning_llm.train.distillation import Distillation
from lightning_llm.train.endings import EarlyEnd, FailStalledRun
from lightning_llm.train.module import LanguageModule
from lightning_llm.train.record_logger import RecordLogger
from lightning_llm.train.run_folder import RunFolder, RunLogger
from lightning_llm.train.strategy import TrainStrategy


def build_module(
    plan: Plan, corpus: Corpus, initial: InitialSlice | None = None, distillation: Distillation | None = None
) -> LanguageModule:
    """Return the LightningModule. Its weights are created when training starts, from the seed or from `initial`."""
    names = list(plan.config.data.sources)
    return LanguageModule(plan.config, corpus.tokenizer, names, plan.decision, initial, distillation)


def build_trainer(
    plan: Plan,
    device: torch.device,
    layout: Layout,
    start: Start,
    loggers: list[RunLogger],
    facts: Mapping[str, Any] | None = None,
    chosen: Mapping[str, pl.Callback] | None = None,
    adopt: Callable[[], None] | None = None,
) -> pl.Trainer:
    """Return the Trainer. Order of callbacks: `chosen`, run folder, checkpointing, check for a stalled run.

    Args:
        facts: further facts for the run's summary, besides the config.
        chosen: the result of `build_callbacks`, if it was already called.
        adopt: called once `start` has loaded on every rank; from then on the files of the folder may be changed.
    """
    config = plan.config
    chosen = build_callbacks(config) if chosen is None else chosen
    if config.trainer.deterministic:
        # Filling every torch.empty with NaN only helps to find faults in kernels; it takes 3.5 % of a quickstart step's
        # operator time on a CPU.
        settings: Any = torch.utils.deterministic  # type checkers do not know this module's attributes
        settings.fill_uninitialized_memory = False
    told = [*loggers, *(each for each in chosen.values() if isinstance(each, RunLogger))]
    known, unverified = {**(facts or {}), **config_facts(config)}, _unverified_steps(start, Path(config.run.dir))
    folder = RunFolder(Path(config.run.dir), told, _resumed_from(config, start), known, adopt, unverified)
    environment = TorchElasticEnvironment() if rank_environment() else LightningEnvironment()
    devices = config.trainer.devices
    trainer = pl.Trainer(
        accelerator="cuda" if device.type == "cuda" else "cpu",
        devices=devices,
        num_nodes=(config.world or devices) // devices,
        strategy=TrainStrategy(layout, device, environment, start.checkpoint, start.changes_optimizer(config)),
        max_steps=config.trainer.max_steps,
        max_epochs=-1,
        val_check_interval=config.trainer.validate_every_steps or config.trainer.max_steps,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        deterministic=config.trainer.deterministic,
        use_distributed_sampler=False,
        callbacks=_callbacks(plan, chosen, folder, start),
        logger=RecordLogger(folder.run_dir, loggers),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,  # a block compiled under inference_mode is compiled again to train
        default_root_dir=config.run.dir,
    )
    # Lightning would broadcast before each batch whether SIGTERM was received and wait for the device. Ranks exchange
    # this with the metrics of a step instead (`TrainStrategy.ask_to_stop`).
    vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = lambda: None
    return trainer


def config_facts(config: Config) -> dict[str, Any]:
    """Return the config's facts for summaries and manifests: the seed, and a digest of keys fixed across resumes."""
    return {"seed": config.seed, "config_digest": config_digest(flatten(config.model_dump()))}


def attention_of(plan: Plan, kernels: Mapping[str, str]) -> AbstractContextManager[None]:
    """Return the context of the run's steps, which selects the kernels found by `attention_kernels`."""
    return attention_by(plan.config.trainer.attention_kernel, by_blocks=FLEX in kernels.values())


def _callbacks(plan: Plan, chosen: Mapping[str, pl.Callback], folder: RunFolder, start: Start) -> list[pl.Callback]:
    config, checkpoints = plan.config, folder.run_dir / "checkpoints"
    known = {**config_facts(config), FROZEN_CONFIG: frozen_values(flatten(config.model_dump()))}
    return [
        *chosen.values(),
        EarlyEnd(chosen),
        Superseding(checkpoints, {each.folder for each in start.skipped if not each.outdated}),
        folder,
        Checkpointing(
            checkpoints,
            config.checkpoint,
            start.run,
            plan.identity,
            config.trainer.max_steps,
            config.trainer.validate_every_steps,
            start.step if _goes_on(start, checkpoints) else None,
            about=lambda step: {**known, RECORDS: folder.chain.at(step).as_data()},
            check_folder=folder.held.check,
        ),
        FailStalledRun(start.run.begun_at_step or 0),
    ]


def _goes_on(start: Start, checkpoints: Path) -> bool:
    """Return whether the run resumes from a checkpoint in its own folder."""
    return start.checkpoint is not None and same_folder(start.checkpoint.run_folder, checkpoints.parent)


def _unverified_steps(start: Start, run_dir: Path) -> int:
    """Return the last step recorded by an earlier release, which wrote no checksums of step metrics."""
    if start.checkpoint is None or not _goes_on(start, run_dir / "checkpoints"):
        return 0
    records = start.checkpoint.records
    return start.step if records is None else records.unverified_steps


def _resumed_from(config: Config, start: Start) -> int | None:
    """Return the step that the run's metrics are truncated to: 0 for a restart in its folder, None for a new run."""
    if start.checkpoint is not None:
        return start.checkpoint.step
    return 0 if Path(config.run.dir, "metrics.jsonl").exists() and config.resume is not None else None
