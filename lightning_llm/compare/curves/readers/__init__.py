"""Readers of logs, one file per program or syntax; the format of a log is detected from its content."""

import os
import zlib
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.compare.curves.named import logs_within
from lightning_llm.compare.curves.readers import csv_files, json_files, runs, tensorboard
from lightning_llm.compare.curves.readers.megatron import Megatron
from lightning_llm.compare.curves.readers.programs import LitGPT, MaxText, NanoChat, NanoGPT, TorchTitan
from lightning_llm.compare.curves.table import LoggedTable, LogSource, Reader, head_of

PROGRAMS = (Megatron, TorchTitan, NanoChat, NanoGPT, LitGPT, MaxText)
READERS: tuple[Reader, ...] = (
    runs.RUN_FOLDER_READER, runs.MLFLOW_READER, json_files.TRAINER_STATE_READER, tensorboard.READER,
    *(Reader(program.format, program.recognizes, program.read) for program in PROGRAMS),
    json_files.JSON_READER, json_files.JSONL_READER, csv_files.WANDB_READER, csv_files.CSV_READER,
)  # fmt: skip
"""All readers; the first that recognizes a log reads it, so general formats come last."""
HEAD_BYTES = 1 << 20
"""Size of the start of a file by which its format is recognized. Logs may begin with long configs and warnings."""


def read_table(address: str, format: str | None = None) -> LoggedTable:
    """Return the numeric columns of the log at `address`, a path or URI.

    Args:
        format: name of its reader; None to detect it from the content.

    Raises:
        ConfigError: the log is missing, its format unknown, or it is damaged.
    """
    known = ", ".join(reader.format for reader in READERS)
    reading = "read"
    try:
        source = _open(address)
        reader = _named(format, known) if format is not None else _detected(source)
        if reader is None:
            raise ConfigError(Problem(address, _unknown(source, known)))
        reading = f"read as {reader.format}"
        return reader.read(source)
    except (EOFError, zlib.error) as error:
        text = f"cannot be {reading}: its gzip stream is damaged or cut off ({error}). Copy the file again."
        raise ConfigError(Problem(address, text)) from error
    except (ValueError, OSError, OverflowError, RecursionError) as error:
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(Problem(address, f"cannot be {reading}: {why}")) from error


def _unknown(source: LogSource, known: str) -> str:
    if source.is_folder and source.path is not None:
        text = "is a folder, but none of TensorBoard events, of the Trainer, of MLflow or of lightning-llm."
        return f"{text} {logs_within(source.path)}"
    return f"its content has no known format. Allowed: {known}. Name one with --format, or convert the log to CSV."


def _named(format: str, known: str) -> Reader:
    for reader in READERS:
        if reader.format == format:
            return reader
    text = f"no such format.{did_you_mean(format, [reader.format for reader in READERS])} Allowed: {known}."
    raise ConfigError(Problem("--format", text, format))


def _detected(source: LogSource) -> Reader | None:
    return next((reader for reader in READERS if reader.recognizes(source)), None)


def _open(address: str) -> LogSource:
    """Return the source with the start of its content.

    Raises:
        ConfigError: the path does not exist, cannot be read, or the file is empty.
    """
    if runs.is_mlflow_address(address):
        return LogSource(address, None)
    path, part = Path(os.path.expanduser(address)), ""
    if "#" in address and not path.exists():
        file, _, part = address.partition("#")
        path = Path(os.path.expanduser(file))
    try:
        if path.is_dir():
            return LogSource(address, path, part=part)
        head = head_of(path, HEAD_BYTES)
    except OSError as error:
        why = error.strerror or error
        text = f"cannot be read ({why}). Name a log file, a folder of TensorBoard events or an MLflow run."
        raise ConfigError(Problem(address, text)) from error
    if not head.strip():
        raise ConfigError(Problem(address, "is empty. Name a log with at least two points."))
    return LogSource(address, path, head, part)
