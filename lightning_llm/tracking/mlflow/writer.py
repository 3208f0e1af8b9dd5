"""Process that logs a run's folder to MLflow, started by `tracker.MLflowTracker`.

It is a process rather than a thread because importing mlflow and writing a batch hold the interpreter for 1.5 s and
about 35 ms, which a thread would take from the training loop (measured: 0.8 ms per step). It follows `metrics.jsonl`,
so nothing is lost or queued while MLflow is unreachable. It outlives a killed training process to log its end.

Protocol, one JSON object per line. Input: a job (see `MLflowTracker`), then {"status", "detail", "figures"}; the end of
the input without the latter means that the training process died. Output: {"event": "connected" | "trouble" |
"closed", ...}.
"""

import contextlib
import json
import math
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lightning_llm.base.process import take_process
from lightning_llm.config.workspace import same_folder
from lightning_llm.tracking.evaluations import evaluation_points
from lightning_llm.tracking.files import decode
from lightning_llm.tracking.mlflow.store import STATUSES, known_run, mark_orphans, noted_id, open_store, truncate


class Trouble(NamedTuple):
    """Advice on a problem with MLflow: the remedy as text, and whether a retry within seconds may help."""

    advice: str
    passes: bool


NO_ANSWER = Trouble("Check that it is up, or set logger.tracking_uri, or logger=none.", passes=True)
REFUSED = NO_ANSWER._replace(passes=False)
NOT_ALLOWED = Trouble(
    "The server rejects these credentials: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
    "MLFLOW_TRACKING_TOKEN, of an account with write access to the experiment.",
    passes=False,
)
TOO_LARGE = Trouble(
    "The server or a proxy rejects requests of this size: raise its limit (nginx: client_max_body_size).",
    passes=False,
)
DELETED = Trouble(
    "The experiment or run was deleted there: restore it (mlflow experiments restore --experiment-id ID), or set "
    "run.experiment to another name.",
    passes=False,
)
BY_STATUS = {401: NOT_ALLOWED, 403: NOT_ALLOWED, 413: TOO_LARGE}
BY_CODE = {"UNAUTHENTICATED": NOT_ALLOWED, "PERMISSION_DENIED": NOT_ALLOWED}


def trouble_of(error: BaseException) -> Trouble:
    """Return the advice on an exception of MLflow's client."""
    for each in _chain(error):
        if isinstance(each, ConnectionRefusedError):  # nothing listens at the address
            return REFUSED
        text = str(each)
        if "must be in the 'active' state" in text:
            return DELETED
        if (found := BY_CODE.get(str(getattr(each, "error_code", "")))) is not None:
            return found
        status = re.search(r"error code (\d{3})\b|\b(\d{3}) Client Error", text)
        if status and (found := BY_STATUS.get(int(status[1] or status[2]))) is not None:
            return found
    return NO_ANSWER


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and its causes; urllib3 stores causes in `reason` and in its arguments."""
    seen: set[int] = set()
    left = [error]
    while left:
        each = left.pop(0)
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            left += [each.__cause__, each.__context__, getattr(each, "reason", None), *each.args]


RUN_ID_FILE = "mlflow_run_id"
FIRST_METRICS = {"loss", "val_loss"}
"""Metrics to log first, since MLflow's comparison page opens with the first one."""
NOT_METRICS = {"step", "time", "timing_warmup"}
FIRST_ARTIFACTS = ("config.yaml",)
LAST_ARTIFACTS = ("loss.png", "summary.json", "sample.txt", "health.txt", "health.jsonl", "outliers.svg", "events")
METRICS_PER_BATCH = 1000
LONGEST_PAUSE_SECONDS = 60.0
DIED = {"status": "stopped", "detail": "the training process ended without recording a status", "figures": {}}

Point = tuple[str, float, int, int]


def points(record: Mapping[str, Any]) -> list[Point]:
    """Return (key, value, milliseconds, step) of each number in `record`; NaN and infinities as `nonfinite/<key>` = 1.

    MLflow would store infinity as 1.8e308, which ruins charts.
    """
    made = []
    for key, value in sorted(record.items(), key=lambda item: item[0] not in FIRST_METRICS):
        if key not in NOT_METRICS and isinstance(value, int | float):
            name, finite = re.sub(r"[^/\w.\- :]", "_", key), math.isfinite(value)
            point = (name, float(value)) if finite else (f"nonfinite/{name}", 1.0)
            made.append((*point, round(record["time"] * 1000), record["step"]))
    return made


def log_evaluations(client: Any, run_id: str, folder: Path) -> None:
    """Log the evaluations in a run's folder to MLflow as "eval/NAME" at their steps, except values it already has."""
    from mlflow.entities import Metric

    made: list[Any] = []
    for record in evaluation_points(folder):
        for key, value, milliseconds, step in points({**record, "time": time.time()}):
            known = client.get_metric_history(run_id, key)
            if not any(each.step == step and each.value == value for each in known):
                made.append(Metric(key, value, milliseconds, step))
    for start in range(0, len(made), METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=made[start : start + METRICS_PER_BATCH])


class RunWriter:
    """Writer of one MLflow run. Every method may be called again after it raised.

    No step of a metric is logged twice, also by different processes: a killed run that resumes from its checkpoint
    computes steps again that MLflow already has.
    """

    def __init__(self, job: Mapping[str, Any]):
        self.job = job
        self.run_dir = Path(job["run_dir"])
        self.run_id = ""
        self.experiment_id = ""
        self._client: Any = None
        self._offset = 0
        self._last_steps: dict[str, int] = {}  # last step of each metric in the store
        self._last = {"step": 0, "time": time.time()}

    def sync(self) -> None:
        """Log all new records in `metrics.jsonl`; connect first if needed."""
        self.connect()
        from mlflow.entities import Metric

        for batch, end in self._new_batches():
            self._client.log_batch(self.run_id, metrics=[Metric(*point) for point in batch])
            self._last_steps |= {key: step for key, _, _, step in batch}
            self._offset = end

    def finish(self, status: str, detail: str, figures: Mapping[str, Any]) -> None:
        """Log remaining records, final figures and files, and the status of the run."""
        self.sync()
        from mlflow.entities import Metric

        final = points({**{f"final/{key}": value for key, value in figures.items()}, **self._last})
        self._client.log_batch(self.run_id, metrics=[Metric(*point) for point in final])
        log_evaluations(self._client, self.run_id, self.run_dir)
        self._set_tags({"status_detail": detail})
        self._log_artifacts(self._client, LAST_ARTIFACTS)
        self._client.set_terminated(self.run_id, STATUSES[status], self.job.get("ended_milliseconds"))

    def _new_batches(self) -> Iterator[tuple[list[Point], int]]:
        """Yield (points, file offset after them); an incomplete last line is left for the next call."""
        path = self.run_dir / "metrics.jsonl"
        batch: list[Point] = []
        end = self._offset
        last_steps = dict(self._last_steps)
        with path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                record = decode(line)
                made = [point for point in points(record) if point[3] > last_steps.get(point[0], -1)]
                last_steps |= {key: step for key, _, _, step in made}
                if len(batch) + len(made) > METRICS_PER_BATCH:
                    yield batch, end
                    batch = []
                batch += made
                end += len(line)
                self._last = {"step": record["step"], "time": record["time"]}
        if batch:
            yield batch, end

    def connect(self) -> bool:
        """Find or create the run in MLflow and describe it; return False if this was already done."""
        if self._client is not None:
            return False
        client, experiment_id = open_store(self.job["tracking_uri"], self.job["experiment"])
        id_file = self.run_dir / self.job.get("id_file", RUN_ID_FILE)
        run = known_run(client, noted_id(id_file))
        if run is None or self._is_of_original(run, id_file):
            # These tags identify the run as an orphan if this process is killed before it has stored the id.
            known = {key: self.job["tags"][key] for key in ("process", "run_dir") if key in self.job["tags"]}
            run = client.create_run(experiment_id, run_name=self.job["run_name"], tags=known)
            id_file.write_text(run.info.run_id + "\n")
        self.run_id, self.experiment_id = run.info.run_id, experiment_id
        self._describe(client, run)  # including its process, so that other runs can check that it is alive
        if self.job.get("ended_milliseconds") is None:
            client.update_run(run.info.run_id, status="RUNNING")
        self._log_datasets(client)
        self._log_artifacts(client, FIRST_ARTIFACTS)
        mark_orphans(client, experiment_id, but=self.run_id)  # not this run, since `finish` writes its status
        self._client = client
        return True

    def _is_of_original(self, run: Any, id_file: Path) -> bool:
        """Return whether this folder is a copy, and `run` belongs to the original folder, which still exists."""
        original = Path(run.data.tags.get("run_dir", self.run_dir))
        return not same_folder(original, self.run_dir) and noted_id(original / id_file.name) == run.info.run_id

    def _describe(self, client: Any, run: Any) -> None:
        """Log parameters and tags. Parameters are immutable, so a resumed run logs changed ones as tags."""
        from mlflow.entities import Param, RunTag

        known, tags = run.data.params, dict(self.job["tags"])
        params = truncate(client, run.info.run_id, "params", self.job["params"])
        tags |= {f"resumed/{key}": value for key, value in params.items() if known.get(key, value) != value}
        if self.job["resumed_from_step"] is not None:
            tags["resumed_from_step"] = str(self.job["resumed_from_step"])
        self._last_steps = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        client.log_batch(
            run.info.run_id,
            params=[Param(key, value) for key, value in params.items() if key not in known],
            tags=[RunTag(key, value) for key, value in truncate(client, run.info.run_id, "tags", tags).items()],
        )

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        fitted = truncate(self._client, self.run_id, "tags", tags)
        self._client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in fitted.items()])

    def _log_datasets(self, client: Any) -> None:
        """Log the data sources as the run's inputs; MLflow identifies them by name and digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        context = [InputTag("mlflow.data.context", "training")]
        inputs = [DatasetInput(Dataset(**each), context) for each in self.job.get("datasets", [])]
        if inputs:
            client.log_inputs(self.run_id, datasets=inputs)

    def _log_artifacts(self, client: Any, names: tuple[str, ...]) -> None:
        for name in names:
            path = self.run_dir / name
            if path.is_dir():
                client.log_artifacts(self.run_id, str(path), name)
            elif path.exists():
                client.log_artifact(self.run_id, str(path))


def main() -> None:
    """Log the run that the job on stdin describes until it ends, and at most `close_seconds` longer."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the training process handles them and sends the status here
    os.nice(10)
    inbox: queue.Queue[dict[str, Any]] = queue.Queue()
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_read_inbox, args=(inbox,), daemon=True).start()
    writer, pause, ending, start = RunWriter(job), job["flush_seconds"], None, 0.0
    while True:
        try:
            if ending:
                writer.finish(**ending)
                break
            if writer.connect():
                start = time.process_time()  # imports, and creation of the database
                _send({"event": "connected", "run_id": writer.run_id, "experiment_id": writer.experiment_id})
            writer.sync()
            pause = job["flush_seconds"]
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0][:500]
            trouble = trouble_of(error)
            _send({"event": "trouble", "text": text, "advice": trouble.advice})
            if ending and not trouble.passes:
                return  # the run is ending, and a retry within seconds would not help
            pause = min(LONGEST_PAUSE_SECONDS, 2 * pause) if ending is None else 0.5
        if ending:
            time.sleep(pause)
            continue
        with contextlib.suppress(queue.Empty):
            ending = inbox.get(timeout=pause)
            signal.alarm(math.ceil(job["close_seconds"]))  # ends this process even if MLflow hangs
    cpu_seconds = {"start_cpu_seconds": start, "cpu_seconds": time.process_time() - start}
    _send({"event": "closed", "run_id": writer.run_id, **cpu_seconds})


def _send(event: Mapping[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the training process died; its end is still logged to MLflow
        print(json.dumps(event), flush=True)


def _read_inbox(inbox: "queue.Queue[dict[str, Any]]") -> None:
    line = sys.stdin.buffer.readline()
    inbox.put(json.loads(line) if line.endswith(b"\n") else DIED)


if __name__ == "__main__":
    take_process()
    main()
