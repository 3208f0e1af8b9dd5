"""Links to MLflow's pages of runs, printed after a run, a sweep and a comparison, and by `make ui`.

MLflow 3 opens on its pages for agents and prompts; runs are on those of an experiment, as machine learning.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

from lightning_llm.base.process import python_environment
from lightning_llm.config.redact import redact_uri
from lightning_llm.config.workspace import default_outputs, program
from lightning_llm.tracking.mlflow.store import PATIENCE, existing_store, sqlite_address, sqlite_file

LOCAL_SERVER = "http://localhost:5000"
"""Default address of `mlflow ui`."""


def experiment_page(server: str, experiment_id: str | None) -> str:
    """Return the address of the runs of an experiment, or of the list of experiments if it is unknown."""
    page = f"experiments/{experiment_id}" if experiment_id else "experiments"
    return f"{redact_uri(server).rstrip('/')}/#/{page}?workflowType=machine_learning"


def artifact_page(uri: str, experiment_id: str, run_id: str, path: str) -> str:
    """Return the address of MLflow's page of an artifact of a run tracked at `uri`."""
    server = redact_uri(uri).rstrip("/") if uri.startswith(("http://", "https://")) else LOCAL_SERVER
    return f"{server}/#/experiments/{experiment_id}/runs/{run_id}/artifacts/{path}?workflowType=machine_learning"


def children_page(experiment_id: str, parent_id: str) -> str:
    """Return a link to the charts of all runs of a sweep, one line per run; it is relative to MLflow's server.

    `parent_id`: the sweep's parent run, whose own page shows only its counts of jobs.
    """
    only = quote(f"tags.`mlflow.parentRunId` = '{parent_id}'", safe="")
    query = f"searchFilter={only}&compareRunsMode=CHART&workflowType=machine_learning"
    return f"#/experiments/{experiment_id}/runs?{query}"


def ui_command(uri: str) -> str:
    """Return the command that opens MLflow's UI on the database `uri`."""
    return shlex.join([*program("mlflow", "mlflow"), "ui", "--workers", "1", "--backend-store-uri", redact_uri(uri)])


def ui_lines(uri: str, experiment_id: str | None) -> list[str]:
    """Return lines for a terminal that tell how to view the runs of an experiment tracked at `uri`."""
    if uri.startswith(("http://", "https://")):
        return [f"curves {experiment_page(uri, experiment_id)}"]
    if sqlite_file(uri) is None:
        return [f"curves in MLflow at {redact_uri(uri)}"]
    return [f"curves {ui_command(uri)}", f"       then open {experiment_page(LOCAL_SERVER, experiment_id)}"]


def main() -> int:
    """Run MLflow's UI on the outputs folder's database, after printing the pages of the newest experiments (`make ui`).

    Returns the exit code.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI") or sqlite_address(Path(default_outputs(), "mlflow.db"))
    if uri.startswith(("http://", "https://")):
        print("\n".join(ui_lines(uri, None)))
        return 0
    try:
        experiments = existing_store(uri).search_experiments(order_by=["last_update_time DESC"], max_results=10)
    except FileNotFoundError:
        print(f"there are no runs yet: the first run creates {redact_uri(uri)}", file=sys.stderr)
        return 1
    server = f"http://localhost:{_port(sys.argv[1:])}"
    for each in experiments:
        if each.name != "Default":  # MLflow's own experiment, not used here
            print(f"{each.name:<24} {experiment_page(server, each.experiment_id)}", flush=True)
    command = [*program("mlflow", "mlflow"), "ui", "--workers", "1", "--backend-store-uri", uri, *sys.argv[1:]]
    os.chdir(Path(default_outputs()))  # MLflow creates ./mlruns in the working directory
    return subprocess.call(command, env={**PATIENCE, **os.environ, **python_environment()})


def _port(arguments: list[str]) -> str:
    for word, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, _, value = word.partition("=")
        if name in ("--port", "-p"):
            return value or following
    return LOCAL_SERVER.rpartition(":")[2]


if __name__ == "__main__":
    sys.exit(main())
