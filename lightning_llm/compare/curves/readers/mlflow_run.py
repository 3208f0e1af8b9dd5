"""Reader of MLflow runs, through MLflow's client."""

import math
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from lightning_llm.base.sqlite_address import sqlite_address
from lightning_llm.compare.curves.named import is_uri
from lightning_llm.compare.curves.readers.attempts import Attempts, columns_by_step
from lightning_llm.compare.curves.table import LoggedTable, LogSource, Reader
from lightning_llm.tracking.mlflow.store import existing_store

RUN = re.compile(r"^runs:/+(?P<run>\w+)/?$")
PAGE = re.compile(r"^(?P<store>https?://.+?)/?#/experiments/[^/]+/runs/(?P<run>\w+)")
STORED = re.compile(r"^(?P<store>.+)#(?P<run>\w+)$")
RUN_ID = re.compile(r"^[0-9a-f]{32}$")
SQLITE = b"SQLite format 3"
SYSTEM = "system/"
"""Prefix of metrics that MLflow itself logs about the machine."""
FORMS = "runs:/RUN_ID (of MLFLOW_TRACKING_URI), TRACKING_URI#RUN_ID, a run's page in the UI or its folder in mlruns"


def is_address(address: str) -> bool:
    """Return whether an address is a URI, or TRACKING_URI#RUN_ID of a store without a scheme (a folder or database)."""
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


def recognizes(source: LogSource) -> bool:
    """Return whether it is the URI of a run, or its folder in a file store."""
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


def read(source: LogSource) -> LoggedTable:
    """Return the metrics of a run by step, and its parameters as settings.

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
    params = {key: _setting(value) for key, value in run.data.params.items()}
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


def _setting(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text


READER = Reader("mlflow", recognizes, read)
