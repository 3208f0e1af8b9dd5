"""Failures of writing or reading a checkpoint, raised identically on every rank."""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from lightning_llm.base.errors import StorageError
from lightning_llm.base.integrity import unpickling_problem
from lightning_llm.train.checkpoint.manifest import DamagedError

UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    RuntimeError,
    SafetensorError,
    DamagedError,
    pickle.UnpicklingError,
)
"""Exceptions raised when reading damaged content that has no digest to verify it by."""


@contextmanager
def on_all_ranks(failed: str, *kinds: type[Exception], group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Context that raises StorageError on all ranks if the block raises one of `kinds` on any of them. Collective.

    `failed`: begin of the error's text. `group`: the ranks, None: all. The block must not contain collectives.
    """
    problem, cause = None, None
    try:
        yield
    except kinds as error:
        problem, cause = _in_words(error), error
    found = [problem]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, problem, group=group)
    if any(found):
        raise StorageError(_of_ranks(failed, {rank: text for rank, text in enumerate(found) if text})) from cause


@contextmanager
def torchs_failures(failed: str, *kinds: type[Exception]) -> Iterator[None]:
    """Context that replaces torch's CheckpointException by a StorageError with the text `failed` and the first cause.

    Torch raises that exception on every rank. It stays if a cause is not one of `kinds`.
    """
    try:
        yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        if signals := [cause for cause in causes if not isinstance(cause, Exception)]:
            raise signals[0] from error
        if not all(isinstance(cause, kinds) for cause in causes):
            raise
        problems = {rank: _in_words(cause) for rank, (cause, _) in error.failures.items()}
        raise StorageError(_of_ranks(failed, problems)) from error


def _of_ranks(failed: str, problems: Mapping[int, str]) -> str:
    """Return one line with the failure and its reason; names the rank if there are several."""
    (rank, text), *others = problems.items()
    several = dist.is_initialized() and dist.get_world_size() > 1
    more = f", and {len(others)} other rank(s)" if others else ""
    return f"{failed}: {f'rank {rank}{more}: ' if several else ''}{text}"


def _in_words(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f" ({error.filename})" if error.filename else "")
    if isinstance(error, pickle.UnpicklingError):
        return f"a tensor {unpickling_problem(error)}"
    text = (str(error).splitlines() or [""])[0]
    return text if isinstance(error, OSError | DamagedError) else f"{type(error).__name__}: {text}"[:300]


TORCHS_WARNINGS = ("torch.distributed is disabled", "Detected pickle protocol")


@contextmanager
def without_its_warnings() -> Iterator[None]:
    """Context without torch's warnings about checkpoints of one process and about rejected pickles."""
    with warnings.catch_warnings():
        for message in TORCHS_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        yield


def ignore_its_warnings() -> None:
    """Suppress the warnings of `without_its_warnings` for the rest of the process.

    For background threads: filters belong to the process, so restoring them would affect other threads.
    """
    for message in TORCHS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
