"""Uploading the data of runs and sweeps that MLflow lacks, from their folders, for the verb `sync`."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning_llm.config.from_file import load_config
from lightning_llm.config.redact import redact_uri
from lightning_llm.config.schema import Config
from lightning_llm.tracking.files import read_records, summary_of, write_json
from lightning_llm.tracking.final_figures import final_figures
from lightning_llm.tracking.mlflow.store import ORPHANED, own_process
from lightning_llm.tracking.mlflow.sweep import TIMEOUT_SECONDS, parent_job, update
from lightning_llm.tracking.mlflow.tracker import tracking_uri, writer_job
from lightning_llm.tracking.mlflow.writer import RUN_ID_FILE, RunWriter
from lightning_llm.tracking.run_state import SETTLED, mlflow_facts, state_of
from lightning_llm.tracking.sweep_file import FILE, checked_sweep

STATED = {"status", "host", "process", "device", "git", "versions"}
"""Keys of summary.json that every run writes at its start and logs to MLflow."""
SECONDS_PER_RUN = 5.0
"""Time per run in `catch_up`, in addition to MLflow's response time."""


def catch_up(folders: Sequence[Path]) -> str:
    """Upload those of the run `folders` that are not completely in MLflow; return the problem, or "" for success.

    With many jobs on few cores, a job may end before the process that uploads its data. Jobs of a killed start have no
    such process.
    """
    behind = [str(folder) for folder in folders if _is_behind(folder)]
    if not behind:
        return ""
    command, environment = own_process("lightning_llm")
    patience = TIMEOUT_SECONDS + SECONDS_PER_RUN * len(behind)
    try:
        done = subprocess.run(
            [*command, "sync", *behind], capture_output=True, text=True, timeout=patience, env=environment,
            start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"syncing {len(behind)} runs took more than {patience:g} s"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else ""


def _is_behind(folder: Path) -> bool:
    return mlflow_facts(folder).get("synced") is False


def configs_of(folder: Path, uri: str | None) -> tuple[Config, Config]:
    """Return (config of the run in `folder` with `uri` as its tracking URI, its original config); None: the same."""
    own = load_config(folder / "config.yaml", [])
    return load_config(folder / "config.yaml", [f"logger.tracking_uri={uri}"]) if uri else own, own


def sync_run(folder: Path, config: Config, own: Config) -> str:
    """Upload the run in `folder` to MLflow; return a text with its state and MLflow's run id.

    `config`, `own`: result of `configs_of`. Raises MLflow's exceptions, and ValueError for a damaged folder.
    """
    # The folder keeps the MLflow of its run for later sessions and verdicts.
    store = redact_uri(tracking_uri(config))
    elsewhere = store != redact_uri(tracking_uri(own))
    id_file = f"{RUN_ID_FILE}-{sha256(store.encode()).hexdigest()[:8]}" if elsewhere else RUN_ID_FILE
    summary = summary_of(folder)
    if lacking := STATED.difference(summary):
        raise ValueError(f"{folder / 'summary.json'} is missing, or has no {', '.join(sorted(lacking))}")
    config = _with_parent(config, folder, id_file if elsewhere else None)
    state = state_of(folder)
    if state == "stopped" and summary["status"] == "running":
        summary |= {"status": "stopped", "detail": ORPHANED}
    job = {**writer_job(config, folder, summary), "id_file": id_file}
    if state != "running":
        job["ended_milliseconds"] = _ended_milliseconds(folder, summary)
    writer = RunWriter(job)
    if state == "running":
        writer.sync()
    else:
        writer.finish(
            summary["status"], summary.get("detail", ""), final_figures(read_records(folder / "metrics.jsonl"))
        )
    about = {**summary.get("mlflow", {}), "synced": state != "running"}
    if not elsewhere:
        about["experiment_id"] = writer.experiment_id
    about.pop("problem", None)
    if state != "running" and not elsewhere:  # a running process writes its summary itself
        write_json(folder / "summary.json", {**summary, "mlflow_run_id": writer.run_id, "mlflow": about})
    return f"{state}, run {writer.run_id}"


def _ended_milliseconds(folder: Path, summary: Mapping[str, Any]) -> int:
    """Return the end time of the run; if it was not recorded, the time of its last record."""
    if "ended_at" in summary:
        return round(1000 * datetime.fromisoformat(summary["ended_at"]).timestamp())
    return round(1000 * (folder / "metrics.jsonl").stat().st_mtime)


def _with_parent(config: Config, folder: Path, id_file: str | None) -> Config:
    """Return the config with its sweep's parent run in the tags; create the parent run if it does not exist.

    `id_file`: file next to the sweep's file with the id of its parent run in another MLflow.
    """
    file = folder.parent / FILE
    if not file.is_file():
        return config
    try:
        about = checked_sweep(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    kept = folder.parent / id_file if id_file else None
    if kept:
        about["mlflow_run_id"] = kept.read_text(encoding="utf-8").strip() if kept.exists() else None
    job = parent_job(folder.parent, about, tracking_uri(config), runs_it=False)
    states = [state_of(folder.parent / str(each["number"])) for each in about["jobs"]]
    if "running" not in states:
        job["status"] = "FINISHED" if set(states) <= set(SETTLED) else "FAILED" if "failed" in states else "KILLED"
    parent = update(job)
    if kept:
        kept.write_text(parent + "\n", encoding="utf-8")
    elif parent != about["mlflow_run_id"]:
        write_json(file, {**about, "mlflow_run_id": parent})
    tags = {**config.logger.tags, "mlflow.parentRunId": parent}
    return config.model_copy(update={"logger": config.logger.model_copy(update={"tags": tags})})
