"""The process that keeps MLflow up to date with a run's folder. Started by `mlflow.MLflowTracker`.

A process and not a thread: importing mlflow and writing one batch hold the interpreter for 1.5 s and some 35 ms, which
a thread would take from the training loop (measured: 0.8 ms per step). It follows `metrics.jsonl`, so nothing is lost
or queued while MLflow is away, and it outlives a training process that was killed, long enough to say so.

Protocol, one JSON object per line. In: a job (see `MLflowTracker`), then {"status", "detail", "figures"}; the end of
the input without that means that the training process died. Out: {"event": "connected" | "trouble" | "closed", ...}.
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
from typing import Any

from lightning_llm.callbacks.records import decode

RUN_ID_FILE = "mlflow_run_id"
STATUSES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
NOT_METRICS = {"step", "time", "timing_warmup"}
FIRST_ARTIFACTS = ("config.yaml",)
LAST_ARTIFACTS = ("loss.png", "summary.json", "sample.txt", "health.txt", "health.jsonl")
LARGEST_VALUE = {"params": 6000, "tags": 8000}  # mlflow.utils.validation; beyond it mlflow cuts without a word
METRICS_PER_BATCH = 1000
LONGEST_PAUSE_SECONDS = 60.0
DIED = {"status": "stopped", "detail": "the training process ended without saying how", "figures": {}}

Point = tuple[str, float, int, int]


def points(record: Mapping[str, Any]) -> list[Point]:
    """Return (key, value, milliseconds, step) of each number in `record`; NaN and infinities as `nonfinite/<key>` = 1.

    MLflow would keep infinity as 1.8e308, which no chart survives.
    """
    made = []
    for key, value in record.items():
        if key not in NOT_METRICS and isinstance(value, int | float):
            name, finite = re.sub(r"[^/\w.\- :]", "_", key), math.isfinite(value)
            point = (name, float(value)) if finite else (f"nonfinite/{name}", 1.0)
            made.append((*point, round(record["time"] * 1000), record["step"]))
    return made


class RunWriter:
    """One MLflow run and how much of the run's folder it holds. Every method may be called again after it raised."""

    def __init__(self, job: Mapping[str, Any]):
        self.job = job
        self.run_dir = Path(job["run_dir"])
        self.run_id = ""
        self._client: Any = None
        self._offset = 0
        self._first_step = 0
        self._last = {"step": 0, "time": time.time()}

    def sync(self) -> None:
        """Log every record that is in `metrics.jsonl` by now, connecting first where that was not done."""
        from mlflow.entities import Metric, RunTag

        if self._client is None:
            self._connect()
        for batch, end in self._new_batches():
            tags = [RunTag("synced_step", str(self._last["step"]))]
            self._client.log_batch(self.run_id, metrics=[Metric(*point) for point in batch], tags=tags)
            self._offset = end

    def finish(self, status: str, detail: str, figures: Mapping[str, Any]) -> None:
        """Log what is left, the final figures and files, and how the run ended."""
        from mlflow.entities import Metric

        self.sync()
        final = points({**{f"final/{key}": value for key, value in figures.items()}, **self._last})
        self._client.log_batch(self.run_id, metrics=[Metric(*point) for point in final])
        self._set_tags({"status_detail": detail})
        self._log_artifacts(self._client, LAST_ARTIFACTS)
        self._client.set_terminated(self.run_id, STATUSES[status])

    def _new_batches(self) -> Iterator[tuple[list[Point], int]]:
        """Yield (points, file offset after them); a line still being written waits for the next call."""
        path = self.run_dir / "metrics.jsonl"
        batch: list[Point] = []
        end = self._offset
        with path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                record = decode(line)
                made = points(record) if record["step"] >= self._first_step else []
                if len(batch) + len(made) > METRICS_PER_BATCH:
                    yield batch, end
                    batch = []
                batch += made
                end += len(line)
                self._last = {"step": record["step"], "time": record["time"]}
        if batch:
            yield batch, end

    def _connect(self) -> None:
        client, experiment_id = self._open_store()
        run = self._continued_run(client)
        if run is None:
            run = client.create_run(experiment_id, run_name=self.job["run_name"])
            (self.run_dir / RUN_ID_FILE).write_text(run.info.run_id + "\n")
        else:
            client.update_run(run.info.run_id, status="RUNNING")
        self.run_id = run.info.run_id
        self._describe(client, run)
        self._log_artifacts(client, FIRST_ARTIFACTS)
        self._client = client
        print(json.dumps({"event": "connected", "run_id": self.run_id}), flush=True)

    def _open_store(self) -> tuple[Any, str]:
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        uri, name, options = self.job["tracking_uri"], self.job["experiment"], {}
        lock: Any = contextlib.nullcontext()
        if uri.startswith("sqlite:///"):
            # Several processes that meet a fresh database would all create its tables, and all but one fail.
            from filelock import FileLock

            database = Path(uri.removeprefix("sqlite:///"))
            lock = FileLock(f"{database}.lock", timeout=60)
            # Unless told otherwise MLflow puts artifacts where the process happens to have been started.
            options = {"artifact_location": (database.parent / "mlartifacts").absolute().as_uri()}
        with lock:
            client = MlflowClient(uri)
            experiment = client.get_experiment_by_name(name)
            if experiment is not None:
                return client, experiment.experiment_id
            try:
                return client, client.create_experiment(name, **options)
            except MlflowException:  # on a server another run may have created it in between
                experiment = client.get_experiment_by_name(name)
                if experiment is None:
                    raise
                return client, experiment.experiment_id

    def _continued_run(self, client: Any) -> Any:
        from mlflow.exceptions import MlflowException

        path = self.run_dir / RUN_ID_FILE
        run_id = path.read_text().strip() if path.exists() else ""
        if not run_id:
            return None
        try:
            run = client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":  # another database than the one it was begun in
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _describe(self, client: Any, run: Any) -> None:
        """Log parameters and tags. Parameters are immutable: one that a resumed run changes becomes a tag."""
        from mlflow.entities import Param, RunTag

        known, tags = run.data.params, dict(self.job["tags"])
        params = {key: self._fit(client, "params", key, value) for key, value in self.job["params"].items()}
        tags |= {f"resumed/{key}": value for key, value in params.items() if known.get(key, value) != value}
        resumed, synced = self.job["resumed_from_step"], int(run.data.tags.get("synced_step", 0))
        if resumed is not None:
            tags["resumed_from_step"] = str(resumed)
            # Points after the checkpoint stay in MLflow from before; those up to it may not all have got there.
            self._first_step = synced if synced <= resumed else resumed + 1
        client.log_batch(
            run.info.run_id,
            params=[Param(key, value) for key, value in params.items() if key not in known],
            tags=[RunTag(key, self._fit(client, "tags", key, value)) for key, value in tags.items()],
        )

    def _set_tags(self, tags: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        fitted = {key: self._fit(self._client, "tags", key, value) for key, value in tags.items()}
        self._client.log_batch(self.run_id, tags=[RunTag(key, value) for key, value in fitted.items()])

    def _fit(self, client: Any, kind: str, key: str, value: str) -> str:
        """Return `value`, or its beginning and where the whole of it is, if it is longer than MLflow takes."""
        if len(value) <= LARGEST_VALUE[kind]:
            return value
        file = f"{kind}/{key}.txt"
        client.log_text(self.run_id, value, file)
        marker = f" ... [cut, whole in artifact {file}]"
        return value[: LARGEST_VALUE[kind] - len(marker)] + marker

    def _log_artifacts(self, client: Any, names: tuple[str, ...]) -> None:
        for name in names:
            if (self.run_dir / name).exists():
                client.log_artifact(self.run_id, str(self.run_dir / name))


def main() -> None:
    """Follow the run that the job on the standard input names until it ends, and at most `close_seconds` longer."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the training process decides, and says so here
    os.nice(10)
    inbox: queue.Queue[dict[str, Any]] = queue.Queue()
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_read_inbox, args=(inbox,), daemon=True).start()
    writer, pause, ending = RunWriter(job), job["flush_seconds"], None
    while True:
        try:
            if ending:
                writer.finish(**ending)
                break
            writer.sync()
            pause = job["flush_seconds"]
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0][:500]
            print(json.dumps({"event": "trouble", "text": text}), flush=True)
            pause = min(LONGEST_PAUSE_SECONDS, 2 * pause) if ending is None else 0.5
        if ending:
            time.sleep(pause)
            continue
        with contextlib.suppress(queue.Empty):
            ending = inbox.get(timeout=pause)
            signal.alarm(math.ceil(job["close_seconds"]))  # whatever MLflow does, this process ends
    print(json.dumps({"event": "closed", "run_id": writer.run_id, "cpu_seconds": time.process_time()}), flush=True)


def _read_inbox(inbox: "queue.Queue[dict[str, Any]]") -> None:
    line = sys.stdin.buffer.readline()
    inbox.put(json.loads(line) if line.endswith(b"\n") else DIED)


if __name__ == "__main__":
    main()
