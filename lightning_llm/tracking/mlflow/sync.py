"""The verb `sync`: MLflow gets what it missed, from the folders of runs and sweeps, which have everything."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.from_file import load_config
from lightning_llm.config.redact import redact_uri, redacted
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import default_outputs, folders_named
from lightning_llm.tracking.files import read_records, summary_of, write_json
from lightning_llm.tracking.final_figures import final_figures
from lightning_llm.tracking.mlflow.store import ORPHANED, own_process
from lightning_llm.tracking.mlflow.sweep import TIMEOUT_SECONDS, parent_job, update
from lightning_llm.tracking.mlflow.tracker import tracking_uri, writer_job
from lightning_llm.tracking.mlflow.writer import RUN_ID_FILE, RunWriter
from lightning_llm.tracking.run_state import SETTLED, mlflow_facts, state_of
from lightning_llm.tracking.sweep_file import FILE, checked_sweep

STATED = {"status", "host", "process", "device", "git", "versions"}
"""Keys of summary.json that every run writes as it starts, and MLflow is told."""
SECONDS_PER_RUN = 5.0
"""Of `catch_up`, beside the time that MLflow takes to answer at all."""


def sync(arguments: argparse.Namespace) -> int:
    """Bring MLflow up to date with each run below the given folders; return 0, or 1 where one could not be logged.

    A run whose process died without a word is marked KILLED (and "stopped" in its summary). One that is running is
    brought up to date and left running. No point is logged twice.
    """
    folders = list(_run_folders(arguments.folders or [default_outputs()]))
    if not folders:
        where = ", ".join(arguments.folders) or default_outputs()
        raise ConfigError(Problem("FOLDER", f"there is no run (config.yaml and metrics.jsonl) in {where}."))
    failed = 0
    unreachable: set[str] = set()
    with tempfile.TemporaryDirectory() as elsewhere, chdir(elsewhere):  # MLflow creates ./mlruns where it is
        for folder in folders:
            try:
                config, own = _configs(folder, arguments.tracking_uri)
                server = redact_uri(tracking_uri(config))
                if server in unreachable:
                    failed += 1
                else:
                    print(f"{folder}: {_sync_one(folder, config, own)}", flush=True)
            except Exception as error:  # whatever MLflow raises, the other runs are tried
                failed += 1
                if _is_no_answer(error):
                    unreachable.add(server)
                    print(f"{server} does not answer: no further run is tried there", file=sys.stderr, flush=True)
                    continue
                damage = isinstance(error, ValueError | ConfigError)  # of a file, which is named
                kind = "" if damage else f"{type(error).__name__}: "
                text = redacted(f"{folder}: not logged: {kind}{error}".splitlines()[0])
                print(text[:500], file=sys.stderr, flush=True)
    print(f"sync   {len(folders) - failed} of {len(folders)} runs are in MLflow")
    return 1 if failed else 0


def catch_up(folders: Sequence[Path]) -> str:
    """Sync those of `folders` that MLflow did not get in the time they had; return what went wrong, or "".

    Many jobs at once on few cores end before their writers do; and those of a start that was killed had nobody after
    them.
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
        return f"{len(behind)} runs took more than {patience:g} s to hand in"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1] if done.returncode else ""


def _is_behind(folder: Path) -> bool:
    return mlflow_facts(folder).get("synced") is False


def _run_folders(given: Sequence[str]) -> Iterator[Path]:
    seen, outputs = set(), Path(default_outputs())
    named = {word: folders_named(word, outputs) for word in given}
    text = "is no folder, and no experiment, SWEEP or SWEEP/N in {}."
    missing = [Problem(word, text.format(outputs)) for word, folders in named.items() if not folders]
    if missing:
        raise ConfigError(missing)
    for root in (folder for folders in named.values() for folder in folders):
        for file in sorted(root.absolute().rglob("metrics.jsonl")):
            if (file.parent / "config.yaml").is_file() and file.parent not in seen:
                seen.add(file.parent)
                yield file.parent


def _is_no_answer(error: BaseException | None) -> bool:
    """Return whether a server could not be reached, or did not answer in time: it would not for the next run either."""
    from requests import exceptions  # by which MLflow's client talks to a server

    while error is not None:
        if isinstance(error, exceptions.ConnectionError | exceptions.Timeout):
            return True
        error = error.__cause__ or error.__context__
    return False


def _configs(folder: Path, uri: str | None) -> tuple[Config, Config]:
    """Return the run's config, tracked at `uri` if that is given, and as it was run."""
    own = load_config(folder / "config.yaml", [])
    return load_config(folder / "config.yaml", [f"logger.tracking_uri={uri}"]) if uri else own, own


def _sync_one(folder: Path, config: Config, own: Config) -> str:
    """Log one run; return a word on what was done. Raises whatever MLflow raises."""
    # The folder stays with the MLflow of its run, which later starts and verdicts go to.
    store = redact_uri(tracking_uri(config))
    elsewhere = store != redact_uri(tracking_uri(own))
    id_file = f"{RUN_ID_FILE}-{sha256(store.encode()).hexdigest()[:8]}" if elsewhere else RUN_ID_FILE
    summary = summary_of(folder)
    if lacking := STATED.difference(summary):
        raise ValueError(f"{folder / 'summary.json'} is missing, or lacks {', '.join(sorted(lacking))}")
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
    if state != "running" and not elsewhere:  # its own process writes its summary
        write_json(folder / "summary.json", {**summary, "mlflow_run_id": writer.run_id, "mlflow": about})
    return f"{state}, run {writer.run_id}"


def _ended_milliseconds(folder: Path, summary: Mapping[str, Any]) -> int:
    """Return when the run ended; one that could not say so did with its last record, as far as is known."""
    if "ended_at" in summary:
        return round(1000 * datetime.fromisoformat(summary["ended_at"]).timestamp())
    return round(1000 * (folder / "metrics.jsonl").stat().st_mtime)


def _with_parent(config: Config, folder: Path, id_file: str | None) -> Config:
    """Return the config with its sweep's parent run in the tags; one that could not be made then is made now.

    `id_file`: beside the sweep's file, where its parent's id in another MLflow than its own is kept.
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
