"""`Config` -> the objects that train. Every class named in YAML is made here."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.utils import instantiate
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.callbacks import WeightAveraging

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.terminal import one_line
from lightning_llm.config.config_hash import flatten, frozen_values
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.callbacks import refused
from lightning_llm.config.workspace import same_folder
from lightning_llm.data.corpus import Corpus
from lightning_llm.parallel.apply import InitialSlice
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.resolve import Plan
from lightning_llm.run.facts import config_facts
from lightning_llm.run.launch.environment import rank_environment
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


def choose_device(config: Config) -> torch.device:
    """Return the device of this rank: the CUDA device of its local number, or the CPU.

    Raises:
        ConfigError: trainer.accelerator=cuda where torch finds no CUDA device, or fewer than ranks.
    """
    wanted, found = config.trainer.accelerator, torch.cuda.is_available()
    if wanted == "cuda" and not found:
        text = f"is 'cuda', and torch {torch.__version__} finds no CUDA device. Set auto or cpu."
        raise ConfigError(Problem("trainer.accelerator", text))
    if not found or wanted == "cpu":
        return torch.device("cpu")
    environment = rank_environment()
    if config.trainer.devices > torch.cuda.device_count():
        text = (
            f"is {config.trainer.devices}, and this machine has {torch.cuda.device_count()} CUDA device(s). Lower it."
        )
        raise ConfigError(Problem("trainer.devices", text))
    device = torch.device("cuda", environment.local_rank if environment else 0)
    torch.cuda.set_device(device)
    return device


def build_module(
    plan: Plan, corpus: Corpus, initial: InitialSlice | None = None, distillation: Distillation | None = None
) -> LanguageModule:
    """Return the LightningModule; its weights are made when training starts, of the seed or by `initial`."""
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
    """Return the Trainer, its callbacks in the order: `chosen`, the run folder's writer, checkpointing, and the
    verdict on a run that skipped its last updates.

    `facts` is what the run's summary says of it beside the config. `chosen`: what `build_callbacks` returned, if that
    was called. `adopt` is called as soon as `start` has loaded on every rank: what was there before may be changed from
    then on.
    """
    config = plan.config
    chosen = build_callbacks(config) if chosen is None else chosen
    if config.trainer.deterministic:
        # It would fill every tensor that torch.empty makes, so that whoever reads one before writing it reads NaN: a
        # search for faults in kernels, and 3.5 % of a quickstart step's operator time on a CPU.
        settings: Any = torch.utils.deterministic  # a module whose attributes a type checker does not see
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
    # Before each batch it would send a number around and wait for the device to read it: whether SIGTERM came, of
    # which ranks tell each other with what they read of a step (`TrainStrategy.ask_to_stop`).
    vars(trainer.fit_loop.epoch_loop)["_broadcast_sigterm_tensor"] = lambda: None
    return trainer


def build_callbacks(config: Config) -> dict[str, pl.Callback]:
    """Return the callbacks of the config by name. Source text was checked before; this is the class itself.

    Raises:
        ConfigError: with each that cannot be imported or made, is none, or would fight the strategy, and where two have
            state under one key.
    """
    made: dict[str, pl.Callback] = {}
    problems = []
    for name, node in config.callbacks.items():
        if node is None:
            continue
        key = f"callbacks.{name}"
        try:
            callback = instantiate(node, _convert_="all")
        except (Exception, SystemExit) as error:  # an import, or whatever a constructor has against its arguments
            cause = error.__cause__ or error
            if isinstance(cause, ConfigError):  # one of ours says which argument, and what to change
                problems += [Problem(f"{key}.{each.key}", each.text) for each in cause.problems]
                continue
            text = f"{node['_target_']} cannot be made: {type(cause).__name__}: {one_line(str(cause))}"
            problems.append(Problem(key, text))
            continue
        lineage = [f"{each.__module__}.{each.__qualname__}" for each in type(callback).__mro__]
        if problem := refused(node["_target_"], lineage):
            problems.append(Problem(f"{key}._target_", problem))
        made[name] = callback
    stateful = [each.state_key for each in made.values() if type(each).state_dict is not pl.Callback.state_dict]
    for key in sorted({each for each in stateful if stateful.count(each) > 1}):
        text = f"hold two with state under '{key}'. Give their class a state_key that tells them apart."
        problems.append(Problem("callbacks", text))
    if sum(isinstance(each, WeightAveraging) for each in made.values()) > 1:
        problems.append(Problem("callbacks", "hold two that average weights, which validation can see but one of."))
    if problems:
        raise ConfigError(problems)
    return made


def _callbacks(plan: Plan, chosen: Mapping[str, pl.Callback], folder: RunFolder, start: Start) -> list[pl.Callback]:
    config, checkpoints = plan.config, folder.run_dir / "checkpoints"
    known = {**config_facts(config), FROZEN_CONFIG: frozen_values(flatten(config.model_dump()))}
    return [
        *chosen.values(),
        EarlyEnd(chosen),
        Superseding(checkpoints, {each.folder for each in start.passed_over if not each.outdated}),
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
    """Return whether the run goes on from a checkpoint of its own folder."""
    return start.checkpoint is not None and same_folder(start.checkpoint.run_folder, checkpoints.parent)


def _unverified_steps(start: Start, run_dir: Path) -> int:
    """Return up to which step an earlier release recorded, which says of its records nothing to verify them by."""
    if start.checkpoint is None or not _goes_on(start, run_dir / "checkpoints"):
        return 0
    records = start.checkpoint.records
    return start.step if records is None else records.unverified_steps


def _resumed_from(config: Config, start: Start) -> int | None:
    """Return the step that the run's records are cut back to: 0 for one begun afresh in its folder, None if new."""
    if start.checkpoint is not None:
        return start.checkpoint.step
    return 0 if Path(config.run.dir, "metrics.jsonl").exists() and config.resume is not None else None
