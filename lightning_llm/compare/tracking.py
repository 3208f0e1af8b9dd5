"""Log verdicts to MLflow: to the runs they judge and to the parent run of their sweep. Never fails the command."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.compare.comparison import Comparison
from lightning_llm.compare.format import interval_text, nats
from lightning_llm.compare.report.write import FILES
from lightning_llm.compare.runs.pairing import Pair
from lightning_llm.compare.verdict import Verdict
from lightning_llm.compare.verdict_text import line_of
from lightning_llm.config.redact import redact_uri, redacted, with_credentials
from lightning_llm.config.workspace import sync_command
from lightning_llm.tracking.mlflow.store import LARGEST_VALUE, existing_store, sqlite_address
from lightning_llm.tracking.mlflow.sweep import DESCRIPTION
from lightning_llm.tracking.mlflow.ui import artifact_page, children_page
from lightning_llm.tracking.reading import Run
from lightning_llm.tracking.run_state import state_of
from lightning_llm.tracking.sweep_file import FILE, parent_of_sweep

BEGIN, END = "<!-- verdicts -->", "<!-- end of verdicts -->"
"""Markers around the verdicts in a sweep's description: the text outside belongs to the user."""
WHERE = (
    "The report, with curves, intervals and methods, is under **Artifacts**: `{place}/report.html` opens there "
    "and prints on paper. In the table of runs the columns `verdict` and `final/val_loss_gap` have the "
    "values of each run."
)
"""Sentence in the description on the place of the report in MLflow."""
Place = tuple[str, str]
"""(MLflow tracking URI, id of a run there)."""


def log_verdicts(
    comparison: Comparison, folder: Path, place: str = "compare", lines: Mapping[str, str] | None = None
) -> str:
    """Log the verdicts to MLflow: tags and metrics of the runs, and tags and report files of their parent run.

    Return the lines to print: how many runs were logged, the report's page, what could not be logged. Never raises.

    Args:
        folder: folder of the report.
        place: folder for the report's files among the parent run's artifacts.
        lines: {tag: text} to set on the parent run in addition.
    """
    tracked = [(pair, verdict) for verdict in comparison.verdicts for pair in verdict.pairs if _run_id(pair.run)]
    lacking = lacking_line(comparison.runs)
    clients: dict[str, Any] = {}
    try:
        of_sweep: dict[Path, Place] = {}
        for pair, verdict in tracked:
            uri = tracking_uri(pair)
            if uri not in clients:
                clients[uri] = existing_store(uri)
            if parent := _log_child(clients[uri], pair, verdict):
                of_sweep[pair.run.folder.parent] = (uri, parent)
        parents = _verdicts_by_parent(comparison.verdicts, of_sweep)
        pages = []
        for (uri, parent), verdicts in parents.items():
            client = clients[uri] if uri in clients else existing_store(uri)
            experiment = _log_parent(client, parent, verdicts, folder, place, lines or {})
            pages.append(artifact_page(uri, experiment, parent, f"{place}/report.html"))
    except Exception as error:  # of many kinds: requests', sqlalchemy's, mlflow's own
        why = redacted(f"{type(error).__name__}: {error}".splitlines()[0])[:200]
        printed = [f"note   the verdicts were not logged to MLflow ({why}); the report has everything"]
    else:
        sweeps = f", {len(parents)} sweep" if parents else ""
        logged = f"logged to MLflow: {len(tracked)} runs{sweeps}"
        printed = [logged, *(f"       {page}" for page in pages)] if tracked or parents else []
    return "\n".join([*printed, *([lacking] if lacking else [])])


def lacking_line(runs: Sequence[Run]) -> str:
    """Return a line on how many runs are completely in MLflow, with the command that uploads the rest; "" if all are.

    Runs that still train upload themselves and count as complete.
    """
    meant = [run for run in runs if _run_id(run) or "mlflow" in run.summary]
    behind = [run for run in meant if _is_behind(run)]
    if not behind:
        return ""
    places = (run.folder.parent if (run.folder.parent / FILE).is_file() else run.folder for run in behind)
    return f"note   {len(meant) - len(behind)} of {len(meant)} runs in MLflow; the rest: {sync_command(*places)}"


def _is_behind(run: Run) -> bool:
    lacks = _run_id(run) is None or (run.summary.get("mlflow") or {}).get("synced") is False
    return lacks and state_of(run.folder) != "running"


def _verdicts_by_parent(verdicts: Sequence[Verdict], of_sweep: Mapping[Path, Place]) -> dict[Place, list[Verdict]]:
    """Return {parent run of a sweep: all verdicts on its runs}, including runs missing in MLflow.

    `of_sweep`: {folder of a sweep: its parent}, as its runs in MLflow name it; otherwise it is read from the sweep's
    file.
    """
    known: dict[Path, Place | None] = dict(of_sweep)
    found: dict[Place, list[Verdict]] = {}
    for verdict in verdicts:
        for pair in verdict.pairs:
            sweep = pair.run.folder.parent
            if sweep not in known and "mlflow" in pair.run.summary:
                parent = parent_of_sweep(sweep)
                known[sweep] = (tracking_uri(pair), parent) if parent else None
            parent_run = known.get(sweep)
            if parent_run and not any(each is verdict for each in found.setdefault(parent_run, [])):
                found[parent_run].append(verdict)
    return found


def _run_id(run: Run) -> str | None:
    return run.summary.get("mlflow_run_id")


def tracking_uri(pair: Pair) -> str:
    """Return the MLflow tracking URI in the config of the pair's run, with credentials from the environment."""
    noted = redact_uri(
        (pair.run.summary.get("mlflow") or {}).get("tracking_uri") or ""
    )  # MLFLOW_TRACKING_URI at that time
    uri = pair.run.config.get("logger.tracking_uri") or noted or os.environ.get("MLFLOW_TRACKING_URI")
    return with_credentials(str(uri or sqlite_address(Path(str(pair.run.config.get("run.root")), "mlflow.db"))))


def _log_child(client: Any, pair: Pair, verdict: Verdict) -> str | None:
    """Log the values by which MLflow's table of runs is sorted; return the id of the run's parent."""
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


def _log_parent(
    client: Any, parent: str, verdicts: list[Verdict], folder: Path, place: str, lines: Mapping[str, str]
) -> str:
    """Write the verdicts and the report to the sweep's run; return the id of its experiment."""
    for verdict in verdicts:
        setting = f" {verdict.family.text}" if verdict.family.text else ""
        client.set_tag(parent, f"verdict/{_safe(verdict.name + setting)}", line_of(verdict)[:5000])
    for key, line in lines.items():
        client.set_tag(parent, _safe(key), line[:5000])
    run = client.get_run(parent)
    curves = f"[Curves of all jobs]({children_page(str(run.info.experiment_id), parent)})"
    before = run.data.tags.get(DESCRIPTION, "").removeprefix(f"{curves}. ")  # written at the start of the sweep
    parts = (headline(verdicts), curves, verdict_table(verdicts), WHERE.format(place=place))
    client.set_tag(parent, DESCRIPTION, described(before, "\n\n".join(parts)))
    for file in sorted(folder.iterdir()):
        if file.name in ("report.html", *FILES) or (file.name.startswith("figure-") and file.suffix == ".svg"):
            client.log_artifact(parent, str(file), place)
    return str(run.info.experiment_id)


def headline(verdicts: Sequence[Verdict]) -> str:
    """Return all verdicts in one line of Markdown. MLflow shows only the first lines of a description."""
    found: dict[str, list[str]] = {}
    for verdict in verdicts:
        name = " ".join(filter(None, (verdict.name, verdict.family.text)))
        found.setdefault(verdict.qualified, []).append(name)
    terms, baseline = verdicts[0].terms, verdicts[0].factor.baseline_label
    parts = (f"**{qualified}**: {', '.join(names)}" for qualified, names in found.items())
    return f"{'; '.join(parts)} (against {baseline}, margin {terms.margin_text})."


def verdict_table(verdicts: Sequence[Verdict]) -> str:
    """Return a Markdown table of the verdicts and their sentences, for the description of a sweep in MLflow."""
    lines = ["| recipe | verdict | gap, nats | interval | pairs |", "|---|---|---:|---|---:|"]
    for verdict in verdicts:
        estimate = verdict.judged.estimate
        cells = [
            " ".join(filter(None, (verdict.name, verdict.family.text))),
            f"**{verdict.qualified}**",
            nats(estimate.gap, signed=True) if math.isfinite(estimate.gap) else "",
            interval_text(estimate.low, estimate.high) if math.isfinite(estimate.low) else "",
            str(len(verdict.judged.measured.seeds)),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, "", *(f"- {line_of(verdict)}" for verdict in verdicts)])


def described(before: str, verdicts: str) -> str:
    """Return the description `before` with `verdicts` at its beginning, in place of earlier ones; other text stays."""
    head, begin, rest = before.partition(BEGIN)
    others = [head.strip(), rest.partition(END)[2].strip() if begin else ""]
    kept = "\n\n".join(filter(None, others))
    room = LARGEST_VALUE["tags"] - len(kept) - len(BEGIN) - len(END) - 8
    return f"{BEGIN}\n{verdicts[: max(0, room)]}\n{END}\n\n{kept}".rstrip()


def _safe(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in text)[:200]


def _id(pair: Pair) -> str:
    return str(pair.baseline.summary.get("mlflow_run_id") or "")


def _milliseconds() -> int:
    return round(time.time() * 1000)
