"""Writing of checkpoints, one at a time, synchronously or in a background thread; a checkpoint is complete or
absent."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightning_llm.base.errors import StorageError
from lightning_llm.base.integrity import FileContent, sync_to_disk
from lightning_llm.config.schema import CheckpointConfig
from lightning_llm.train.checkpoint.failures import (
    ignore_its_warnings,
    on_all_ranks,
    torchs_failures,
    without_its_warnings,
)
from lightning_llm.train.checkpoint.manifest import MANIFEST, TENSORS, RunIdentity, sealed_manifest
from lightning_llm.train.checkpoint.retention import prune, put_in_place
from lightning_llm.train.checkpoint.snapshot import CpuCopies, Snapshot, take
from lightning_llm.train.checkpoint.tensor_storage import TensorWriter
from lightning_llm.train.module import LanguageModule

ABANDONED_SECONDS = 10.0
"""Timeout in seconds for a thread with an abandoned write to notice it at the next block of its file."""


class Saver:
    """Writer of a run's checkpoints, which also deletes old ones by the retention rules.

    `saved_step` is the step of the newest complete checkpoint, `taken_step` that of the newest snapshot, which may
    still be being written.
    """

    def __init__(
        self,
        folder: Path,
        config: CheckpointConfig,
        run: RunIdentity,
        config_hash: str,
        saved_step: int | None = None,
        about: Callable[[int], Mapping[str, Any]] = lambda step: {},
        check_folder: Callable[[], None] = lambda: None,
    ):
        """Prepare to save.

        Args:
            folder: the run's `checkpoints` folder.
            config: intervals, retention rules, and whether to save asynchronously.
            run: identity of the run, written into checkpoints.
            config_hash: written into checkpoints.
            saved_step: step of the newest checkpoint in `folder`, None without one.
            about: returns further entries of the manifest for a step; called on the first rank.
            check_folder: called on the first rank before each write; raises OSError if the run's folder is gone.
        """
        self.folder = folder
        self.config = config
        self.run = run
        self.config_hash = config_hash
        self.about = about
        self.check_folder = check_folder
        self.saved_step = self.taken_step = saved_step
        self.asynchronous = False
        self._device = torch.device("cpu")
        self._group: dist.ProcessGroup | None = None
        self._copies = CpuCopies()
        self._writing: _Write | None = None
        self._abandoned = threading.Event()
        self._told_of_waiting = False

    def start(self, module: LanguageModule, saved_step: int | None) -> None:
        """Prepare for the first save in training; creates the process group of the background thread. Collective.

        `saved_step`: step of the newest checkpoint in the folder, None without one.
        """
        strategy = module.trainer.strategy
        self.saved_step = self.taken_step = saved_step
        self._device = strategy.root_device
        chosen = self.config.asynchronous
        self.asynchronous = self._device.type == "cuda" if chosen is None else chosen
        if self.asynchronous:
            ignore_its_warnings()
            self._group = strategy.layout.writing_group()

    def save(
        self,
        module: LanguageModule,
        optimizer: torch.optim.Optimizer,
        val_losses: Mapping[int, float],
        *,
        awaited: bool = False,
    ) -> None:
        """Save the current state of training, after the save in progress. Collective.

        `awaited`: return only when it is on disk, even if saves are asynchronous. `val_losses`: by step, of validated
        steps.

        Raises:
            StorageError: on every rank; this save or the previous one failed.
            ConfigError: a callback's state has a type that checkpoints cannot store.
        """
        step, late = module.completed_steps, self._writing
        began, under_way = time.monotonic(), late is not None and late.is_alive()
        self.wait()
        if late is not None and under_way and not awaited:
            self._tell_of_waiting(late.step, step, time.monotonic() - began)
        snapshot = take(module, optimizer)
        if is_global_zero():
            snapshot = replace(snapshot, about=self.about(step))
        self.taken_step = step
        if awaited or not self.asynchronous:
            self._finish(snapshot, val_losses)
            return
        copied = self._copies.copy(snapshot)
        self._writing = _Write(step, partial(self._beside_training, copied, dict(val_losses)))
        self._writing.start()

    @property
    def failed(self) -> bool:
        """Whether an asynchronous write has failed on this rank and was not reported yet."""
        return self._writing is not None and self._writing.failure is not None

    def wait(self) -> None:
        """Wait for the save in progress.

        Raises:
            StorageError: on every rank, if it failed; raised once.
        """
        if self._writing is None:
            return
        self._writing.join()
        failure, self._writing = self._writing.failure, None
        if failure is not None:
            raise failure

    def close(self, at_once: bool) -> None:
        """Wait for the save in progress when training has ended for any reason; `at_once`: abandon it instead.

        An unreported failure is printed to stderr, because something else ended the run.
        """
        if self._writing is None:
            return
        if at_once:
            self._abandoned.set()
        self._writing.join(ABANDONED_SECONDS if at_once else None)
        failure, self._writing = self._writing.failure, None
        if failure is not None and not at_once and is_global_zero():
            text = str(failure) if isinstance(failure, StorageError) else f"{type(failure).__name__}: {failure}"
            print(f"note   {text}", file=sys.stderr, flush=True)

    def _beside_training(self, snapshot: Snapshot, val_losses: Mapping[int, float]) -> None:
        if self._device.type != "cuda":
            self._finish(snapshot, val_losses, self._group)
            return
        torch.cuda.set_device(self._device)  # a new thread starts with device 0
        # torch's writer waits for the current stream, which training would keep busy.
        with torch.cuda.stream(torch.cuda.Stream()):
            self._finish(snapshot, val_losses, self._group)

    def _finish(
        self, snapshot: Snapshot, val_losses: Mapping[int, float], group: dist.ProcessGroup | None = None
    ) -> None:
        if snapshot.copies is not None:
            snapshot.copies.wait()
        write(self.folder, snapshot, self.run, self.config_hash, group, self._abandoned, self.check_folder)
        self.saved_step = snapshot.step
        if is_global_zero():
            try:
                prune(self.folder, self.config, self.run, val_losses)
            except OSError as error:  # a checkpoint that is not removed costs only disk space
                print(f"note   an old checkpoint could not be removed: {error}", file=sys.stderr, flush=True)

    def _tell_of_waiting(self, earlier: int, step: int, seconds: float) -> None:
        if is_global_zero() and not self._told_of_waiting:
            text = f"step={earlier} was still being written when step={step} was due: training waited {seconds:.1f} s"
            print(f"note   {text}. Increase checkpoint.every_steps to avoid this. Reported once", flush=True)
        self._told_of_waiting = True


class _Write(threading.Thread):
    """Background write of `step`; `failure`: the exception that ended it, None while it runs or if it succeeded.

    A daemon thread: the process can exit without waiting for it. The incomplete folder is not read as a checkpoint.
    """

    def __init__(self, step: int, work: Callable[[], None]):
        super().__init__(name=f"checkpoint step={step}", daemon=True)
        self.step = step
        self.failure: BaseException | None = None
        self._work = work

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # raised again by `wait`
            self.failure = error
        finally:
            del self._work  # drops references to the state


def write(
    folder: Path,
    snapshot: Snapshot,
    run: RunIdentity,
    config_hash: str,
    group: dist.ProcessGroup | None = None,
    abandoned: threading.Event | None = None,
    check_folder: Callable[[], None] = lambda: None,
) -> None:
    """Write `folder`/step=N; it appears under that name only when every rank's bytes are on disk. Collective.

    Args:
        folder: the `checkpoints` folder of `run`, seen by all ranks.
        group: all ranks, on the CPU; None: the world's. A background thread needs its own group.
        check_folder: raises OSError, on the first rank, if the run's folder is no longer at its path.
        abandoned: set this event to make the write fail.

    Raises:
        StorageError: on every rank, if one could not write; nothing of the checkpoint remains.
    """
    step = snapshot.step
    partial = folder / f".step={step}.partial"
    first = is_global_zero()
    failed = f"the state of step {step} was not saved"
    # A thread must not restore warning filters, because they belong to the whole process.
    in_main_thread = threading.current_thread() is threading.main_thread()
    try:
        with on_all_ranks(failed, OSError, group=group):
            if first:
                check_folder()
                shutil.rmtree(partial, ignore_errors=True)
                folder.mkdir(exist_ok=True)  # without parents, so that a deleted run folder is not created again
                partial.mkdir()
        writer = TensorWriter(partial / TENSORS, abandoned)
        with torchs_failures(failed, OSError), without_its_warnings() if in_main_thread else nullcontext():
            dcp.save(
                dict(snapshot.tensors),
                storage_writer=writer,
                planner=snapshot.planner,
                process_group=group,
                no_dist=not dist.is_initialized(),
            )
        with on_all_ranks(failed, OSError, group=group):
            if first:
                _write_rest(partial, snapshot, writer.files, run, config_hash)
                put_in_place(folder / f"step={step}", partial, run)
                sync_to_disk(folder)
    except StorageError:
        if first:
            shutil.rmtree(partial, ignore_errors=True)  # frees space on a full disk
        raise


def is_global_zero() -> bool:
    """Return whether this is rank 0, which writes files and messages for all ranks."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _write_rest(
    partial: Path,
    snapshot: Snapshot,
    tensors: Mapping[str, FileContent],
    run: RunIdentity,
    config_hash: str,
) -> None:
    """Write the files of the first rank, the manifest last, and sync `partial` to disk."""
    if missing := sorted(name for name in tensors if not (partial / TENSORS / name).is_file()):
        raise OSError(_not_shared(partial, missing))
    files = {f"{TENSORS}/{name}": each for name, each in tensors.items()}
    files |= {name: FileContent.of(each) for name, each in snapshot.content.items()}
    origin = {"run_id": run.id, "written_in": str(partial.parent), "config_hash": config_hash}
    manifest = sealed_manifest(snapshot.step, {**origin, "torch": torch.__version__, **snapshot.about}, files)
    for name, each in {**snapshot.content, MANIFEST: manifest}.items():
        (partial / name).write_bytes(each)
        sync_to_disk(partial / name)
    for path in (partial / TENSORS, partial):
        sync_to_disk(path)


def _not_shared(partial: Path, missing: list[str]) -> str:
    text = f"{partial.parent} is not shared by all ranks ({', '.join(missing)} of other ranks are missing here)"
    return f"the checkpoint is incomplete: {text}. Set run.root to storage that all nodes share."
