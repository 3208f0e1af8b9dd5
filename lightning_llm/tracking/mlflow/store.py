"""An MLflow store opened so that many processes may do so at once, and what dead processes left in it. No torch."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_llm.base.imports import slow_imports
from lightning_llm.base.interpreter import python_environment, python_module
from lightning_llm.base.sqlite_address import sqlite_address, sqlite_file
from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.liveness import has_died
from lightning_llm.tracking.provenance import has_ended

LARGEST_VALUE = {"params": 6000, "tags": 8000}  # mlflow.utils.validation; beyond it mlflow cuts without a word
STATUSES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
"""MLflow's words for how a run ended."""
ORPHANED = "its process died without saying how it ended"
PATIENCE = {
    # Without these an unreachable server is tried for minutes before anyone hears of it.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Of the environment, where it does not say otherwise. Set before MLflow is imported, which is when it begins to report
its use."""


def own_process(module: str) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of a process that runs our `module` and talks to MLflow in one thread."""
    return python_module(module), {**PATIENCE, "OMP_NUM_THREADS": "1", **os.environ, **python_environment()}


def _client(uri: str) -> Any:
    for key, value in PATIENCE.items():
        os.environ.setdefault(key, value)
    with slow_imports():
        from mlflow import MlflowClient

    return MlflowClient(uri)


def existing_store(uri: str) -> Any:
    """Return a client of a store that must be there already, in this process.

    Raises:
        FileNotFoundError: there is no such database.
    """
    if (database := sqlite_file(uri)) is not None and not database.exists():
        raise FileNotFoundError(f"there is no {uri}")
    return _client(uri)


def open_store(uri: str, experiment_name: str) -> tuple[Any, str]:
    """Return (client, id of the experiment), both made where they are not there yet."""
    lock: Any = contextlib.nullcontext()
    options = {}
    if (database := sqlite_file(uri)) is not None:
        # Several processes that meet a fresh database would all create its tables, and all but one fail.
        from filelock import FileLock

        database.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{database}.lock", timeout=60)
        # Unless told otherwise MLflow puts artifacts where the process happens to have been started.
        options = {"artifact_location": (database.parent / "mlartifacts").absolute().as_uri()}
    with lock:
        if database is not None and not database.exists():
            _create(database)
        client = _client(uri)
        from mlflow.exceptions import MlflowException

        experiment = client.get_experiment_by_name(experiment_name)
        if experiment is not None:
            return client, experiment.experiment_id
        try:
            return client, client.create_experiment(experiment_name, **options)
        except MlflowException:  # on a server another run may have created it in between
            experiment = client.get_experiment_by_name(experiment_name)
            if experiment is None:
                raise
            return client, experiment.experiment_id


def _create(database: Path) -> None:
    """Make MLflow's tables in a file beside `database`, which appears whole: a writer killed on the way would leave
    tables half made, and no MLflow goes on from those.
    """
    partial = database.with_name(f"{database.name}.partial")
    for left in (partial, partial.with_name(f"{partial.name}-journal")):
        left.unlink(missing_ok=True)
    partial.touch()  # SQLite would make it 0644 at most, whatever the umask leaves to a group
    _client(sqlite_address(partial)).search_experiments(max_results=1)
    os.replace(partial, database)


def noted_id(file: Path) -> str | None:
    """Return the id of an MLflow run that `file` holds; None where there is none, or it is damaged."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch(r"[\w-]{1,64}", text) else None


def known_run(client: Any, run_id: str | None) -> Any:
    """Return the run of that id, or None if this store does not have it, or has it deleted."""
    from mlflow.exceptions import MlflowException

    if not run_id:
        return None
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # another store than the one it was begun in
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def all_runs(client: Any, experiment_id: str, condition: str = "") -> Iterator[Any]:
    """Yield every run of an experiment that `condition` holds for, over all pages."""
    token = None
    while True:
        page = client.search_runs([experiment_id], condition, max_results=1000, page_token=token)
        yield from page
        if not (token := page.token):
            return


def mark_orphans(client: Any, experiment_id: str, but: str) -> list[str]:
    """Mark runs that say RUNNING and whose process is gone; return their ids. Run `but` stays.

    They are KILLED, unless their folder says how they ended.

    A process of another machine is known to be gone where its run's folder can be seen from here. So ends what went
    down with its machine, or was killed together with its writer.
    """
    marked = []
    for run in list(all_runs(client, experiment_id, "attributes.status = 'RUNNING'")):
        if run.info.run_id != but and (fate := _fate(run.data.tags)):
            status, detail = fate
            client.set_tag(run.info.run_id, "status_detail", detail)
            client.set_terminated(run.info.run_id, status)
            marked.append(run.info.run_id)
    return marked


def _fate(tags: Mapping[str, str]) -> tuple[str, str] | None:
    """Return MLflow's status of a run whose process is gone, and why; None of one that may live.

    A process may have ended its run and not its writer: then the folder says how.
    """
    fingerprint, folder = tags.get("process", ""), Path(tags.get("run_dir", ""))
    try:  # two machines may have folders of one name: this one is asked where it is that process's
        summary = summary_of(folder)
    except ValueError:
        summary = {}
    here = bool(fingerprint) and summary.get("process") == fingerprint
    if not (has_ended(fingerprint) or (here and has_died(folder, fingerprint))):
        return None
    if here and summary.get("status") in STATUSES:
        return STATUSES[summary["status"]], str(summary.get("detail", ""))
    return "KILLED", ORPHANED


def truncate(client: Any, run_id: str, kind: str, values: Mapping[str, str]) -> dict[str, str]:
    """Return `values`, those longer than MLflow takes as a beginning and where the whole is; `kind`: params or tags."""
    return {key: _fit(client, run_id, kind, key, value) for key, value in values.items()}


def _fit(client: Any, run_id: str, kind: str, key: str, value: str) -> str:
    if len(value) <= LARGEST_VALUE[kind]:
        return value
    file = f"{kind}/{key}.txt"
    client.log_text(run_id, value, file)
    marker = f" ... [cut, whole in artifact {file}]"
    return value[: LARGEST_VALUE[kind] - len(marker)] + marker
