"""The verdicts in MLflow: on the runs they are about, and on the sweep they belong to. Never fails the command."""

import math
import os
import time
from pathlib import Path
from typing import Any

from lightning_llm.callbacks.mlflow_store import existing_store
from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.pairing import Pair
from lightning_llm.compare.verdict import Verdict
from lightning_llm.compare.wording import line_of

FILES = ("compare.json", "report.html", "verdicts.csv", "verdicts.tex")


def log_verdicts(comparison: Comparison, folder: Path) -> str:
    """Set tags and metrics on the runs, and tags and files on their parent; return what to say of it, or ""."""
    tracked = [
        (pair, verdict)
        for verdict in comparison.verdicts
        for pair in verdict.pairs
        if pair.run.summary.get("mlflow_run_id")
    ]
    if not tracked:
        return ""
    clients: dict[str, Any] = {}
    parents: dict[tuple[str, str], list[Verdict]] = {}
    try:
        for pair, verdict in tracked:
            uri = tracking_uri(pair)
            if uri not in clients:
                clients[uri] = existing_store(uri)
            parent = _log_child(clients[uri], pair, verdict)
            if parent and not any(each is verdict for each in parents.setdefault((uri, parent), [])):
                parents[uri, parent].append(verdict)
        for (uri, parent), verdicts in parents.items():
            _log_parent(clients[uri], parent, verdicts, folder)
    except Exception as error:  # of many kinds: requests', sqlalchemy's, mlflow's own
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return f"note   the verdicts were not logged to MLflow ({why}); the report has everything"
    return f"logged to MLflow: {len(tracked)} runs" + (f", {len(parents)} sweep" if parents else "")


def tracking_uri(pair: Pair) -> str:
    """Return where the pair's run is tracked, by its own config as it was run."""
    uri = pair.run.config.get("logger.tracking_uri")
    noted = (pair.run.summary.get("mlflow") or {}).get("tracking_uri", "")
    if not uri and noted and "***@" not in noted:
        uri = noted  # what MLFLOW_TRACKING_URI was then
    return str(uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{pair.run.config.get('run.root')}/mlflow.db")


def _log_child(client: Any, pair: Pair, verdict: Verdict) -> str | None:
    """Log what MLflow's table of runs is to be sorted by; return the id of the run's parent."""
    from mlflow.entities import Metric, RunTag

    run_id = pair.run.summary["mlflow_run_id"]
    now, step, estimate = _milliseconds(), pair.run.last_step, verdict.judged.estimate
    figures = {
        "final/val_loss_gap": verdict.judged.measured.differences.get(pair.run.seed, math.nan),
        "verdict/gap": estimate.gap,
        "verdict/high": estimate.high,
    }
    metrics = [Metric(key, value, now, step) for key, value in figures.items() if math.isfinite(value)]
    tags = {"verdict": verdict.qualified, "verdict.line": line_of(verdict), "verdict.baseline_run_id": _id(pair)}
    client.log_batch(run_id, metrics=metrics, tags=[RunTag(key, value[:5000]) for key, value in tags.items()])
    return client.get_run(run_id).data.tags.get("mlflow.parentRunId")


def _log_parent(client: Any, parent: str, verdicts: list[Verdict], folder: Path) -> None:
    for verdict in verdicts:
        words = f" {verdict.family.words}" if verdict.family.words else ""
        client.set_tag(parent, f"verdict/{_safe(verdict.name + words)}", line_of(verdict)[:5000])
    for file in sorted(folder.iterdir()):
        if file.name in FILES or (file.name.startswith("figure-") and file.suffix == ".svg"):
            client.log_artifact(parent, str(file), "compare")


def _safe(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in text)[:200]


def _id(pair: Pair) -> str:
    return str(pair.baseline.summary.get("mlflow_run_id") or "")


def _milliseconds() -> int:
    return round(time.time() * 1000)
