"""Readers of recorded runs: run folders of lightning-llm, and MLflow runs through MLflow's client."""

import math
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lightning_llm.compare.curves.named import is_uri
from lightning_llm.compare.curves.readers.attempts import Attempts, columns_by_step
from lightning_llm.compare.curves.table import LoggedTable, LogSource, Reader, columns_of, integer_or_text
from lightning_llm.config.config_hash import flatten
from lightning_llm.config.workspace import command
from lightning_llm.tracking.files import TOKENIZER_DIGEST, read_records
from lightning_llm.tracking.mlflow.store import existing_store, sqlite_address
from lightning_llm.tracking.reading import read_run

RECORDS = "metrics.jsonl"
STANDARD = {
    "global_batch_size": "data.global_batch_size", "sequence_length": "data.sequence_length",
    "total_steps": "trainer.max_steps", "vocab_size": "data.tokenizer.vocab_size",
}  # fmt: skip
"""Standard names of settings, and the keys of a config that have them."""


def recognizes_run_folder(source: LogSource) -> bool:
    """Return whether `source` is a run folder of lightning-llm, its metrics.jsonl, or a folder of such runs."""
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


def read_run_folder(source: LogSource) -> LoggedTable:
    """Return the metrics of a run folder by step, with its seed, sizes and tokenizer as settings.

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


RUN_FOLDER_READER = Reader("lightning-llm", recognizes_run_folder, read_run_folder)


RUN = re.compile(r"^runs:/+(?P<run>\w+)/?$")
PAGE = re.compile(r"^(?P<store>https?://.+?)/?#/experiments/[^/]+/runs/(?P<run>\w+)")
STORED = re.compile(r"^(?P<store>.+)#(?P<run>\w+)$")
RUN_ID = re.compile(r"^[0-9a-f]{32}$")
SQLITE = b"SQLite format 3"
SYSTEM = "system/"
"""Prefix of metrics that MLflow itself logs about the machine."""
FORMS = "runs:/RUN_ID (of MLFLOW_TRACKING_URI), TRACKING_URI#RUN_ID, a run's page in the UI or its folder in mlruns"


def is_mlflow_address(address: str) -> bool:
    """Return whether `address` names an MLflow run: a URI, or PATH#RUN_ID with the path of a store."""
    if is_uri(address):
        return True
    found = STORED.match(address)
    return (
        found is not None and RUN_ID.match(found["run"]) is not None and not Path(address).exists() and _is_store(found)
    )


def _is_store(found: re.Match[str]) -> bool:
    store = Path(found["store"]).expanduser()
    if store.is_file():
        with store.open("rb") as file:
            return file.read(len(SQLITE)) == SQLITE
    return (store / ".trash").is_dir() or (store / "0").is_dir() or bool(list(store.glob("*/meta.yaml")))


def recognizes_mlflow(source: LogSource) -> bool:
    """Return whether `source` is the URI of an MLflow run, or its folder in a file store."""
    if source.path is not None:
        return source.is_folder and (source.path / "meta.yaml").is_file() and (source.path / "metrics").is_dir()
    return True


def _located(source: LogSource) -> tuple[str | None, str] | None:
    """Return (tracking URI, run id), None if the address has none of `FORMS`."""
    if source.path is not None:
        run = source.path.absolute()
        return run.parents[1].as_uri(), run.name
    address = source.address.removeprefix("mlflow:")
    if found := RUN.match(address):
        return None, found["run"]
    if found := PAGE.match(address) or STORED.match(address):
        store = found["store"]
        if not is_uri(store):
            path = Path(store).expanduser().absolute()
            store = path.as_uri() if path.is_dir() else sqlite_address(path)
        return store, found["run"]
    return None


def read_mlflow(source: LogSource) -> LoggedTable:
    """Return the metrics of an MLflow run by step, with its parameters as settings.

    Raises:
        ValueError: no such run or store, no metrics, or values that cannot be of one run.
    """
    from mlflow.exceptions import MlflowException

    located = _located(source)
    if located is None:
        raise ValueError(f"it names no run. Allowed: {FORMS}.")
    store, run_id = located
    if store is None:
        store = os.environ.get("MLFLOW_TRACKING_URI", "")
        if not store:
            raise ValueError(f"MLFLOW_TRACKING_URI is not set. Set it, or write TRACKING_URI#{run_id}.")
    if store.startswith("file:"):
        if not Path(unquote(store.removeprefix("file://"))).is_dir():
            raise ValueError(f"{store} does not exist")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3.7 and later otherwise refuse to read it
    try:
        client = existing_store(store)
        run = client.get_run(run_id)
        history = {
            key: client.get_metric_history(run_id, key) for key in run.data.metrics if not key.startswith(SYSTEM)
        }
    except MlflowException as error:
        raise ValueError(f"MLflow at {store}: {error.message}") from error
    log = _attempts(history)
    if not log.rows:
        raise ValueError("the run has no metrics with a step")
    params = {key: integer_or_text(value) for key, value in run.data.params.items()}
    settings = params | {"run": run.info.run_name or run_id}
    return LoggedTable("mlflow", source.address, columns_by_step(log.rows), settings, log.notes())


def _attempts(history: dict[str, list[Any]]) -> Attempts:
    """Return the values in the order in which they were logged."""
    points = sorted(
        ((each.timestamp, each.step, name, each.value) for name, values in history.items() for each in values),
        key=lambda point: point[:2],
    )
    if constant := next(
        (name for name, each in history.items() if len(each) > 2 and not any(m.step for m in each)), ""
    ):
        raise ValueError(
            f"all {len(history[constant])} values of '{constant}' have step 0. Log with log_metric(..., step=)"
        )
    log = Attempts()
    row: dict[str, float] = {}
    for at, (_, step, name, value) in enumerate(points):
        row[name] = value if math.isfinite(value) else math.inf
        following = points[at + 1] if at + 1 < len(points) else None
        if following is None or following[1] != step or following[2] in row:
            log.add("the metric history", step, row)
            row = {}
    return log


MLFLOW_READER = Reader("mlflow", recognizes_mlflow, read_mlflow)
