"""Opening an MLflow store from many processes at once, and cleanup after dead processes. No torch.

`sqlite_address` and `sqlite_file` convert between files and SQLAlchemy's addresses, in which "?" and "%" have a special
meaning.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_llm.base.process import python_environment, python_module, slow_imports
from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.provenance import has_ended
from lightning_llm.tracking.run_state import has_died

SQLITE = "sqlite:///"
LARGEST_VALUE = {"params": 6000, "tags": 8000}  # mlflow.utils.validation; mlflow silently truncates longer values
STATUSES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
"""{status of a run in its summary: MLflow's status}."""
ORPHANED = "its process ended without recording a status"
PATIENCE = {
    # By default an unreachable server is tried for minutes without any message.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Default environment variables for MLflow, set before it is imported, since telemetry starts at import."""


def own_process(module: str) -> tuple[list[str], dict[str, str]]:
    """Return (command, environment) of a new process that runs our `module` and uses MLflow in one thread."""
    return python_module(module), {**PATIENCE, "OMP_NUM_THREADS": "1", **os.environ, **python_environment()}


def _client(uri: str) -> Any:
    for key, value in PATIENCE.items():
        os.environ.setdefault(key, value)
    with slow_imports():
        from mlflow import MlflowClient

    return MlflowClient(uri)


def existing_store(uri: str) -> Any:
    """Return an `MlflowClient` of the store at `uri`, which must exist.

    Raises:
        FileNotFoundError: the database does not exist.
    """
    if (database := sqlite_file(uri)) is not None and not database.exists():
        raise FileNotFoundError(f"{uri} does not exist")
    return _client(uri)


def open_store(uri: str, experiment_name: str) -> tuple[Any, str]:
    """Return (`MlflowClient`, id of the experiment); the database and the experiment are created if missing."""
    lock: Any = contextlib.nullcontext()
    options = {}
    if (database := sqlite_file(uri)) is not None:
        # Several processes would all create the tables of a new database, and all but one would fail.
        from filelock import FileLock

        database.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{database}.lock", timeout=60)
        # By default MLflow puts artifacts into the working directory of the process.
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
        except MlflowException:  # on a server, another run may have created it in the meantime
            experiment = client.get_experiment_by_name(experiment_name)
            if experiment is None:
                raise
            return client, experiment.experiment_id


def _create(database: Path) -> None:
    """Create MLflow's tables in a temporary file and move it to `database`.

    A writer killed before would otherwise leave incomplete tables, which MLflow cannot use.
    """
    partial = database.with_name(f"{database.name}.partial")
    for left in (partial, partial.with_name(f"{partial.name}-journal")):
        left.unlink(missing_ok=True)
    partial.touch()  # SQLite creates files with mode 0644 at most, even if the umask allows the group to write
    _client(sqlite_address(partial)).search_experiments(max_results=1)
    os.replace(partial, database)


def noted_id(file: Path) -> str | None:
    """Return the MLflow run id in `file`; None if there is none or the file is damaged."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return text if re.fullmatch(r"[\w-]{1,64}", text) else None


def known_run(client: Any, run_id: str | None) -> Any:
    """Return MLflow's run with the id `run_id`; None if this store does not have it, or if it was deleted."""
    from mlflow.exceptions import MlflowException

    if not run_id:
        return None
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # the run was created in another store
            return None
        raise
    return run if run.info.lifecycle_stage == "active" else None


def all_runs(client: Any, experiment_id: str, condition: str = "") -> Iterator[Any]:
    """Yield every run of an experiment that satisfies `condition`, over all pages."""
    token = None
    while True:
        page = client.search_runs([experiment_id], condition, max_results=1000, page_token=token)
        yield from page
        if not (token := page.token):
            return


def mark_orphans(client: Any, experiment_id: str, but: str) -> list[str]:
    """Set the status of RUNNING runs whose processes have ended; return their ids. `but`: id of a run to skip.

    They become KILLED, unless their folder has another status. So runs that ended with their machine, or were killed
    together with their writer, do not stay RUNNING. For another machine it needs access to the run's folder.
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
    """Return MLflow's status and detail for a run of a process that has ended; None if it may be alive.

    If a run ended before its writer did, the status is taken from its folder.
    """
    fingerprint, folder = tags.get("process", ""), Path(tags.get("run_dir", ""))
    try:  # another machine may have a folder of the same name, so the process is compared, too
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
    """Return `values` with those truncated that are too long for MLflow; their full text is logged as an artifact.

    `kind`: "params" or "tags", which have different limits.
    """
    return {key: _fit(client, run_id, kind, key, value) for key, value in values.items()}


def _fit(client: Any, run_id: str, kind: str, key: str, value: str) -> str:
    if len(value) <= LARGEST_VALUE[kind]:
        return value
    file = f"{kind}/{key}.txt"
    client.log_text(run_id, value, file)
    marker = f" ... [truncated, see artifact {file}]"
    return value[: LARGEST_VALUE[kind] - len(marker)] + marker


def sqlite_address(file: Path) -> str:
    """Return the SQLAlchemy address of the database `file`, with an absolute path: "sqlite:////tmp/a.db"."""
    path = str(file.absolute())
    plain = f"{SQLITE}{path}"
    if "?" not in path and "%" not in path:  # sqlalchemy takes 0.3 seconds to import
        return plain
    from sqlalchemy.engine import URL, make_url

    return plain if make_url(plain).database == path else URL.create("sqlite", database=path).render_as_string()


def sqlite_file(address: str) -> Path | None:
    """Return the file of the SQLite database at `address`; None for an address of another kind."""
    if not address.startswith(SQLITE):
        return None
    if "?" not in address and "%" not in address:
        return Path(address.removeprefix(SQLITE))
    from sqlalchemy.engine import make_url

    return Path(make_url(address).database or "")


def absolute_address(address: str) -> str:
    """Return `address` with an absolute path if it is an SQLite database; other addresses are unchanged."""
    file = sqlite_file(address)
    if file is None or file.is_absolute():
        return address
    from sqlalchemy.engine import make_url

    return make_url(address).set(database=str(file.absolute())).render_as_string()
