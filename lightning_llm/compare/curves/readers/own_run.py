"""Reader of run folders of lightning-llm, to compare them with curves of other trainers."""

from pathlib import Path
from typing import Any

from lightning_llm.compare.curves.readers.cells import columns_of
from lightning_llm.compare.curves.table import LoggedTable, LogSource, Reader
from lightning_llm.config.config_hash import flatten
from lightning_llm.config.workspace import command
from lightning_llm.tracking.files import TOKENIZER_DIGEST, read_records
from lightning_llm.tracking.reading import read_run

RECORDS = "metrics.jsonl"
STANDARD = {
    "global_batch_size": "data.global_batch_size", "sequence_length": "data.sequence_length",
    "total_steps": "trainer.max_steps", "vocab_size": "data.tokenizer.vocab_size",
}  # fmt: skip
"""Standard names of settings, and the keys of a config that have them."""


def recognizes(source: LogSource) -> bool:
    """Return whether it is a run folder, its metrics.jsonl, or a folder of such runs."""
    if source.path is None:
        return False
    folder = source.path if source.is_folder else source.path.parent
    if not source.is_folder and source.path.name != RECORDS:
        return False
    return _is_run(folder) or (source.is_folder and any(map(_is_run, _folders(folder))))


def _is_run(folder: Path) -> bool:
    return (folder / RECORDS).is_file() and (folder / "config.yaml").is_file()


def _folders(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if each.is_dir()]


def read(source: LogSource) -> LoggedTable:
    """Return the records of a run, and its seed, sizes and tokenizer.

    Raises:
        ValueError: a folder of several runs, or damaged records.
    """
    if source.path is None:
        raise ValueError("it is not a folder")
    folder = source.path if source.is_folder else source.path.parent
    if not _is_run(folder):
        raise ValueError(
            f"it has several runs of lightning-llm. Compare them without --from: {command('compare')} {folder}"
        )
    columns, mixed, settings = columns_of(enumerate(read_records(folder / RECORDS), 1))
    return LoggedTable("lightning-llm", source.address, columns, settings | _settings(folder), (), mixed)


def _settings(folder: Path) -> dict[str, Any]:
    """Return the config of a run, with standard names for its seed, sizes and tokenizer.

    Raises:
        ConfigError: the folder is damaged.
    """
    run = read_run(folder)
    settings = {key: value for key, value in flatten(run.config).items() if value is not None}
    for name, key in STANDARD.items():
        if key in settings:
            settings[name] = settings[key]
    if "global_batch_size" in settings and "sequence_length" in settings:
        settings["tokens_per_step"] = settings["global_batch_size"] * settings["sequence_length"]
    if digest := run.summary.get(TOKENIZER_DIGEST):
        settings["tokenizer"] = digest
    return settings


READER = Reader("lightning-llm", recognizes, read)
