"""Fit phase of a run: build the LightningModule and the Trainer, and train under observation.

Observed are silent ranks (by their heartbeats) and exceptions of callbacks; both are reported in one line.
"""

import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_llm.base.errors import CallbackFailedError, ConfigError, StorageError
from lightning_llm.base.integrity import RECORDS
from lightning_llm.base.signals import STOPPING, not_ignored
from lightning_llm.base.terminal import one_line
from lightning_llm.config.config_hash import config_digest, flatten, frozen_values
from lightning_llm.config.redact import redacted
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import same_folder
from lightning_llm.data.corpus import Corpus
from lightning_llm.model.attention.kernel_choice import FLEX, attention_by
from lightning_llm.parallel.apply import InitialSlice
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.process_group import collectives
from lightning_llm.plan.resolve import Plan
from lightning_llm.run.inputs import Inputs
from lightning_llm.run.launch.environment import is_first_rank, print_once, rank_environment
from lightning_llm.run.opening import Rank, build_callbacks
from lightning_llm.run.resume.start import Start
from lightning_llm.tracking.files import mark_failed, summary_of
from lightning_llm.tracking.mlflow.tracker import MLflowTracker
from lightning_llm.tracking.rank_liveness import (
    Beat,
    RankHeartbeat,
    RankSilentError,
    absent_ranks,
    absent_text,
    last_collective,
    silent_ranks,
    silent_text,
)
from lightning_llm.train.checkpoint.checkpointing import Checkpointing, StoppedBySignal, Superseding
from lightning_llm.train.checkpoint.manifest import FROZEN_CONFIG
from lightning_llm.train.distillation import Distillation
from lightning_llm.train.endings import EarlyEnd, FailStalledRun
from lightning_llm.train.loggers import LightningRunLogger, RecordLogger
from lightning_llm.train.module import CorpusDataModule, LanguageModule
from lightning_llm.train.run_folder import RunFolder, RunLogger
from lightning_llm.train.spikes import SpikeRollback, StepNotMadeError
from lightning_llm.train.strategy import TrainStrategy


def fit(
    rank: Rank, start: Start, inputs: Inputs, facts: dict[str, Any], write_first_files: Callable[[], None] | None
) -> None:
    """Build the module and the Trainer, and train until the last step, a signal or a failure.

    `facts`, `write_first_files`: the results of `agree`. Raises as `rank.train_from`.
    """
    plan, config = rank.plan, rank.plan.config
    module = build_module(plan, inputs.corpus, inputs.initial, inputs.distillation)
    module.spikes.rollbacks_made = len(start.rollbacks)
    loggers = run_loggers(config)
    trainer = build_trainer(plan, rank.device, rank.layout, start, loggers, facts, rank.callbacks, write_first_files)
    (checkpointing,) = (each for each in trainer.callbacks if isinstance(each, Checkpointing))
    for number in not_ignored(STOPPING):
        signal.signal(number, checkpointing.stop_outside_steps)
    watched, marked = watched_ranks(config, module), failures_marked(config, rank.callbacks)
    try:
        with attention_of(plan, rank.attention), watched, marked, checkpointing.awaited():
            trainer.fit(module, CorpusDataModule(inputs.corpus, config))
    except SpikeRollback as spike:
        if number := trainer.strategy.stop_signal:  # received in the same step, and known to all ranks
            raise StoppedBySignal(number, checkpointing.saved_step) from spike
        raise
    if ended := module.ended_early:
        print_once(f"ended  by {ended['callback'] or 'a callback'} after step {ended['step']}: {ended['reason']}")


def run_loggers(config: Config) -> list[RunLogger]:
    """Return the loggers that receive the run's records besides its own folder; [] on ranks other than 0."""
    if config.logger.name == "none" or not is_first_rank():
        return []
    logger = MLflowTracker if config.logger.name == "mlflow" else LightningRunLogger
    return [logger(config, Path(config.run.dir))]


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
    """Return a context in which attention uses `kernels`, the result of `opening.attention_kernels`."""
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


OTHER_ENDINGS = (ConfigError, StorageError, StepNotMadeError)
"""Errors that explain by themselves why a run ended."""


@contextmanager
def watched_ranks(config: Config, module: LanguageModule) -> Iterator[None]:
    """Context that writes heartbeats of this rank, and names silent ranks if the block fails; nothing with one rank.

    A failed run leaves the heartbeats in its folder; a rollback to a checkpoint is not a failure.

    Raises:
        RankSilentError: the run failed because other ranks are silent.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    timeout = config.parallel.timeout_seconds
    folder = Path(config.run.dir)
    heartbeat = RankHeartbeat(folder, dist.get_rank(), timeout, lambda: module.completed_steps, collectives)
    heartbeat.start()
    try:
        yield
    except SpikeRollback:  # this process continues
        heartbeat.stop()
        raise
    except Exception as error:
        name_silent_ranks(config, error)
        raise
    except BaseException:  # a signal
        heartbeat.stop()
        raise
    heartbeat.stop()


def name_silent_ranks(config: Config, error: Exception) -> None:
    """Find the ranks that this one waited for in vain before `error`. The first rank that is not silent reports them.

    Raises:
        RankSilentError: there are such ranks. They are reported on stderr and in the summary as the cause of `error`.
    """
    missed, text = _missed(Path(config.run.dir), config.parallel.timeout_seconds)
    if not missed:
        return
    if dist.get_rank() == min(set(range(dist.get_world_size())) - {each.rank for each in missed}):
        print(f"error: {text}", file=sys.stderr, flush=True)
        mark_failed(Path(config.run.dir), text)
    for each in missed:
        each.end_if_stopped()
    raise RankSilentError(text) from error


def _missed(folder: Path, timeout: float) -> tuple[list[Beat], str]:
    """Return the ranks that this one has waited for, and the error text.

    These are the silent ranks or, if there are none, live ranks that did not join the collective. The latter only if
    this rank has been in its collective for long; otherwise it has failed for another reason.
    """
    kept = collectives()
    waited_in = last_collective(kept[-1:])
    if silent := silent_ranks(folder, timeout):
        return silent, silent_text(silent, timeout, waited_in)
    if waited_in is None or waited_in["age_seconds"] < timeout / 2:
        return [], ""
    absent = [each for each in absent_ranks(folder, timeout) if each.rank != dist.get_rank()]
    return absent, absent_text(absent, timeout, waited_in) if absent else ""


@contextmanager
def failures_marked(config: Config, chosen: Mapping[str, pl.Callback]) -> Iterator[None]:
    """Context that replaces an exception of a callback by a CallbackFailedError with a text of one line.

    `chosen`: the config's callbacks by name. The line is also written to summary.json. The whole traceback goes to
    `traceback.txt` in the run's folder, or to `traceback-RANK.txt` on other ranks than the first.

    Raises:
        CallbackFailedError: a callback raised an exception or SystemExit, with any exit code.
        RuntimeError: something else raised SystemExit.
    """
    folder, rank = Path(config.run.dir), dist.get_rank() if dist.is_initialized() else 0
    try:
        yield
    except OTHER_ENDINGS:
        raise
    except (Exception, SystemExit) as error:
        interrupted = isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt)
        cause = (
            error.__context__ if interrupted and error.__context__ else error
        )  # Lightning exits after KeyboardInterrupt
        if (where := _place(cause, chosen)) is None:
            if isinstance(error, SystemExit):
                text = f"SystemExit({error.code}) was raised during training"
                raise RuntimeError(text) from error
            raise
        reason = f"{where}: {type(cause).__name__}: {one_line(redacted(str(cause)))}"
        failure = CallbackFailedError(f"{reason} | full traceback: {_keep(cause, folder, rank)}")
        # The callback's on_exception may have failed before that of the run folder. A failure after the last step
        # does not change the status of the run. There is no summary yet if it fails in setup.
        if rank == 0 and summary_of(folder).get("status", "running") in ("running", "failed"):
            mark_failed(folder, f"{type(failure).__name__}: {failure}")
        raise failure from error


def _place(error: BaseException, chosen: Mapping[str, pl.Callback]) -> str | None:
    """Return the callback of `chosen` that raised `error`, with its hook and line; None if it was none of them."""
    frames = list(traceback.walk_tb(error.__traceback__))
    for index, (frame, line) in enumerate(frames):
        owner = frame.f_locals.get("self")
        name = next((name for name, each in chosen.items() if each is owner), None)
        if name is None:
            continue
        file = frame.f_code.co_filename
        for inner, number in frames[index:]:  # report the last line in the callback's own file
            if inner.f_code.co_filename == file:
                line = number
        kind = f"{type(owner).__module__}.{type(owner).__qualname__}"
        return f"callbacks.{name} ({kind}) failed in {frame.f_code.co_name} ({file}:{line})"
    return None


def _keep(error: BaseException, folder: Path, rank: int) -> Path | str:
    file = folder / (f"traceback-{rank}.txt" if rank else "traceback.txt")
    text = redacted("".join(traceback.format_exception(error)))
    try:
        file.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as problem:
        print(text, file=sys.stderr)
        return f"above ({file} could not be written: {problem.strerror})"
    return file
