"""MLflow parent run of the runs of a sweep. It is written by a separate process, since MLflow is slow and may hang.

stdin of the process is one JSON object: tracking_uri, experiment, run_id (or null), run_name, params, tags, metrics,
status (null while running), description, artifacts. The last line of stdout is {"run_id": ...}.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from filelock import FileLock

from lightning_llm.config.redact import redacted
from lightning_llm.config.workspace import command
from lightning_llm.tracking.mlflow.store import all_runs, known_run, mark_orphans, open_store, own_process, truncate
from lightning_llm.tracking.mlflow.ui import children_page
from lightning_llm.tracking.provenance import has_ended, is_of_this_machine, process_mark, user_name
from lightning_llm.tracking.sweep_file import LOCKS

TIMEOUT_SECONDS = 90.0
DESCRIPTION = "mlflow.note.content"
"""Tag that MLflow shows as a run's description, in Markdown."""


def parent_job(folder: Path, about: Mapping[str, Any], tracking_uri: str, *, runs_it: bool = True) -> dict[str, Any]:
    """Return the description of a sweep's parent run for `write_parent` and `update`, as JSON data.

    Args:
        folder: the sweep's folder.
        about: the content of its `sweep.json`.
        tracking_uri: MLflow's.
        runs_it: True if this process runs the sweep's jobs. Otherwise (`sync`) the status of a running sweep is kept.
    """
    return {
        "tracking_uri": tracking_uri,
        "experiment": about["experiment"],
        "run_id": about["mlflow_run_id"],
        "run_name": folder.name,
        "params": {"recipe": str(about["recipe"])},
        "tags": {
            "sweep": folder.name,
            "sweep_hash": about["hash"],
            "sweep_folder": str(folder),
            **({"process": process_mark()} if runs_it else {}),
            "mlflow.source.name": "lightning-llm",
            "mlflow.source.type": "LOCAL",
            "mlflow.user": user_name(),
            **{f"axis.{key}": ",".join(values) for key, values in about["axes"].items()},
        },
        "metrics": {},
        "status": None,
        "description": f"{len(about['jobs'])} jobs in `{folder}`. The verdict is written here by "
        f"`{command('compare', str(folder))}`.",
        "artifacts": [str(folder / "sweep.json")],
    }


def write_parent(job: Mapping[str, Any]) -> tuple[str | None, str]:
    """Create or update the parent run described by `job` in a new process; return (its id, "") or (None, problem)."""
    command, environment = own_process("lightning_llm.tracking.mlflow.sweep")
    with tempfile.TemporaryDirectory() as folder:  # MLflow creates ./mlruns in the working directory
        try:
            done = subprocess.run(
                command, input=json.dumps(job), capture_output=True, text=True, timeout=TIMEOUT_SECONDS, cwd=folder,
                env=environment, start_new_session=True,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, redacted(str(error))
    if done.returncode:
        return None, redacted((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])[:500]
    return json.loads(done.stdout.strip().splitlines()[-1])["run_id"], ""


def update(job: Mapping[str, Any]) -> str:
    """Create or update the parent run described by `job` in this process; return its id. Raises MLflow's exceptions."""
    client, experiment_id = open_store(job["tracking_uri"], job["experiment"])
    from mlflow.entities import Metric, Param, RunTag

    run = known_run(client, job["run_id"]) or _found_or_made(client, experiment_id, job)
    run_id = str(run.info.run_id)
    mark_orphans(client, experiment_id, but=run_id)
    if DESCRIPTION not in run.data.tags:  # keep a verdict or a user's text
        curves = children_page(experiment_id, run_id)
        client.set_tag(run_id, DESCRIPTION, f"[Curves of all jobs]({curves}). {job['description']}")
    now = round(time.time() * 1000)
    params = {key: value for key, value in job["params"].items() if key not in run.data.params}
    client.log_batch(
        run_id,
        metrics=[Metric(key, float(value), now, 0) for key, value in job["metrics"].items()],
        params=[Param(key, value) for key, value in truncate(client, run_id, "params", params).items()],
        tags=[RunTag(key, value) for key, value in truncate(client, run_id, "tags", job["tags"]).items()],
    )
    for path in job["artifacts"]:
        if Path(path).exists():
            client.log_artifact(run_id, path)
    if "process" not in job["tags"] and _is_alive(run.data.tags.get("process", "")):
        return run_id
    if "status_detail" in run.data.tags:  # of a previous session that was killed
        client.delete_tag(run_id, "status_detail")
    if job["status"]:
        client.set_terminated(run_id, job["status"])
    elif run.info.status != "RUNNING":
        client.update_run(run_id, status="RUNNING")
    return run_id


def _found_or_made(client: Any, experiment_id: str, job: Mapping[str, Any]) -> Any:
    """Return the parent run that a killed session created but did not record in sweep.json, else a new one.

    Such a run has no children, since jobs start after it is recorded. A lock admits one process at a time. The process
    of a killed session may arrive late and creates none.
    """
    tags, folder = job["tags"], Path(job["tags"]["sweep_folder"])
    with FileLock(folder / LOCKS / "parent") if (folder / LOCKS).is_dir() else nullcontext():
        for run in all_runs(client, experiment_id, f"tags.sweep_hash = '{tags['sweep_hash']}'"):
            of_it = f"tags.`mlflow.parentRunId` = '{run.info.run_id}'"
            if run.data.tags.get("sweep_folder") == str(folder) and not any(all_runs(client, experiment_id, of_it)):
                return run
        if has_ended(tags.get("process", "")):
            raise RuntimeError("the session of the sweep that requested its parent run has ended")
        known = {key: tags[key] for key in ("sweep_hash", "sweep_folder", "process") if key in tags}
        return client.create_run(experiment_id, run_name=job["run_name"], tags=known)


def _is_alive(fingerprint: str) -> bool:
    return is_of_this_machine(fingerprint) and not has_ended(fingerprint)


if __name__ == "__main__":
    print(json.dumps({"run_id": update(json.loads(sys.stdin.read()))}))
