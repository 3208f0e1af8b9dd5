"""A snapshot of a run's state -> a checkpoint on disk, whole or not at all."""

import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from lightning_llm.base.errors import StorageError
from lightning_llm.base.integrity import FileContent, sync_to_disk
from lightning_llm.train.checkpoint.failures import on_all_ranks, torchs_failures, without_its_warnings
from lightning_llm.train.checkpoint.manifest import MANIFEST, TENSORS, sealed_manifest
from lightning_llm.train.checkpoint.ownership import RunIdentity
from lightning_llm.train.checkpoint.retention import replace
from lightning_llm.train.checkpoint.snapshot import Snapshot
from lightning_llm.train.checkpoint.tensor_storage import TensorWriter


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
        group: all ranks, on the CPU; None: the world's own. A thread beside training needs one to itself.
        check_folder: raises OSError, on the first rank, where the folder of the run is not at its path any more.
        abandoned: set by whoever does not wait for the end any more: the checkpoint then fails.

    Raises:
        StorageError: on every rank, where one could not write; nothing of the checkpoint is left.
    """
    step = snapshot.step
    partial = folder / f".step={step}.partial"
    first = is_first_rank()
    failed = f"the state of step {step} was not saved"
    # A thread must not swap the warnings' filters, which are the whole process's.
    in_main_thread = threading.current_thread() is threading.main_thread()
    try:
        with on_all_ranks(failed, OSError, group=group):
            if first:
                check_folder()
                shutil.rmtree(partial, ignore_errors=True)
                folder.mkdir(exist_ok=True)  # not its parents: a run's folder that is gone is not made again
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
                replace(folder / f"step={step}", partial, run)
                sync_to_disk(folder)
    except StorageError:
        if first:
            shutil.rmtree(partial, ignore_errors=True)  # what it took of a full disk is given back
        raise


def is_first_rank() -> bool:
    """Return whether this rank writes and tells what one does for all."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _write_rest(
    partial: Path,
    snapshot: Snapshot,
    tensors: Mapping[str, FileContent],
    run: RunIdentity,
    config_hash: str,
) -> None:
    """Write the files that one rank writes for all, the manifest last; what is in `partial` is on the disk then."""
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
    text = f"{partial.parent} is not one folder for all ranks ({', '.join(missing)} of others are not seen here)"
    return f"the checkpoint is not whole: {text}. Set run.root to storage that all nodes share."
