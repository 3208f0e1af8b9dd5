"""Logging of a run to MLflow. A slow or failing MLflow does not affect the run."""

import json
import logging
import os
import selectors
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_llm.config.config_hash import config_hash, flatten
from lightning_llm.config.redact import redact_uri, redacted, with_credentials
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import sync_command
from lightning_llm.tracking.files import Record, Status
from lightning_llm.tracking.mlflow.store import (
    absolute_address,
    existing_store,
    noted_id,
    own_process,
    sqlite_address,
    sqlite_file,
)
from lightning_llm.tracking.mlflow.writer import NO_ANSWER, RUN_ID_FILE, log_evaluations
from lightning_llm.tracking.provenance import user_name

log = logging.getLogger(__name__)

GROUPS = ("model", "parallel", "precision", "data", "optim", "schedule")
COMPARED_KEYS = (
    "recipe",
    "seed",
    "trainer.max_steps",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.deterministic",
    "parallel.activation_checkpoint",
    "parallel.activation_checkpoint_layers",
    "parallel.compile",
    "precision.compute_dtype",
    "model.num_layers",
    "model.hidden_size",
    "model.num_heads",
    "model.num_kv_heads",
    "model.ffn_hidden_size",
    "model.vocab_size",
    "model.tie_embeddings",
    "model.init",
    "data.global_batch_size",
    "data.micro_batch_size",
    "data.sequence_length",
    "data.document_mask",
    "data.tokenizer.kind",
    "data.tokenizer.vocab_size",
    "optim.learning_rate",
    "optim.beta1",
    "optim.beta2",
    "optim.eps",
    "optim.weight_decay",
    "optim.gradient_clip_norm",
    "schedule.warmup_steps",
    "schedule.total_steps",
    "schedule.decay_fraction",
    "schedule.final_factor",
    "schedule.final_learning_rate",
    "schedule.peak_factor",
)


def tracking_uri(config: Config) -> str:
    """Return the tracking URI: logger.tracking_uri, else MLFLOW_TRACKING_URI, else run.root/mlflow.db.

    SQLite's path is made absolute, so that it does not depend on where a process was started. The address is whole,
    with credentials: for MLflow's client, never to be printed or written (`redact_uri`).
    """
    uri = config.logger.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return sqlite_address(Path(config.run.root, "mlflow.db"))
    return with_credentials(uri) if sqlite_file(uri) is None else absolute_address(uri)


def compared_parameters(config: Config) -> dict[str, str]:
    """Return the parameters of a run for MLflow, {key: text}: names of the groups, and keys that runs are compared by.

    A string stays itself, all else is written as in JSON (null, true, 0.003).
    """
    flat = flatten(config.model_dump())
    values = {group: flat[f"{group}.name"] for group in GROUPS}
    values |= {key: flat[key] for key in COMPARED_KEYS if key in flat}
    values |= {"model.layers": " ".join(config.model.layers)} if config.model.layers else {}
    values["data.mix"] = " ".join(f"{name}:{weight:g}" for name, weight in sorted(config.data.trained_weights.items()))
    values["precision.recipe_hash"] = config.precision.recipe_hash
    values["data.step_tokens"] = config.data.global_batch_size * config.data.sequence_length
    return {key: _as_text(value) for key, value in values.items()}


def writer_job(config: Config, run_dir: Path, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a run for `RunWriter`, as JSON data; `facts`: the run's summary."""
    git = facts["git"]
    made = {
        "run_dir": str(run_dir.absolute()),
        "host": facts["host"],
        "process": facts["process"],
        "device": facts["device"],
        "config_hash": config_hash(config),
        "git_sha": git["sha"],
        "git_dirty": git["dirty"],
        "mlflow.source.name": "lightning-llm",
        "mlflow.source.type": "LOCAL",
        "mlflow.user": user_name(),
        "mlflow.source.git.commit": git["sha"],
        **{f"version.{package}": version for package, version in facts["versions"].items()},
        "data_hash": facts.get("data_hash"),
        "precision.runs": facts.get("precision", {}).get("runs"),
        **{f"branch.{key}": value for key, value in facts.get("branch", {}).items()},
        **config.logger.tags,
    }
    parameters = {"parameters": _as_text(facts["parameters"])} if "parameters" in facts else {}
    return {
        "run_dir": str(run_dir.absolute()),
        "tracking_uri": tracking_uri(config),
        "experiment": config.run.experiment,
        "run_name": config.run.name,
        "params": compared_parameters(config) | parameters,
        "tags": {key: _as_text(value) for key, value in made.items() if value is not None},
        "datasets": [
            {
                "name": f"{config.data.name}/{name}",
                "digest": facts.get("data_hash", "unknown")[:36],  # MLflow's limit
                "source_type": source.loader,
                "source": json.dumps(source.model_dump(exclude_none=True)),
            }
            for name, source in config.data.sources.items()
        ],
        "resumed_from_step": None,
    }


class MLflowTracker:
    """`RunLogger` with a separate process that logs the run's folder to MLflow every `flush_seconds`.

    Only `close` waits for MLflow, for at most `close_seconds`. A folder with a run id continues that run.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        flush_seconds: float = 5.0,
        close_seconds: float = 20.0,
    ):
        self.config = config
        self.run_dir = Path(run_dir)
        self.uri = tracking_uri(config)
        self.flush_seconds = flush_seconds
        self.close_seconds = close_seconds
        self.command, self._environment = own_process("lightning_llm.tracking.mlflow.writer")
        self.blocked_seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""  # an incomplete line
        self._last_words = ""
        self._ended: dict[str, Any] | None = None
        self._problem = ""
        self._experiment_id: str | None = None

    def open(self, facts: Mapping[str, Any], resumed_from_step: int | None) -> None:
        """Start the writing process."""
        job = writer_job(self.config, self.run_dir, facts) | {
            "resumed_from_step": resumed_from_step,
            "flush_seconds": self.flush_seconds,
            "close_seconds": self.close_seconds,
        }
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                cwd=self._working_folder(),
                env=self._environment,
                start_new_session=True,  # Ctrl-C should only reach the training process, which reports its end
            )
            os.set_blocking(self._process.stdout.fileno(), False)  # type: ignore[union-attr]
        except OSError as error:
            self._warn(f"its writer could not be started: {error}")
        self._send(job)

    def record(self, record: Record) -> None:
        """Read messages of the writer, which reads the record from `metrics.jsonl` itself."""
        began = time.perf_counter()
        self._receive()
        self.blocked_seconds += time.perf_counter() - began

    def close(self, status: Status, detail: str, figures: Mapping[str, Any]) -> None:
        """Send the final status to the writer and wait for it, at most `close_seconds`."""
        if self._process is None or self._process.stdout is None:  # it could not be started
            self._warn_incomplete()
            return
        deadline = time.monotonic() + self.close_seconds
        self._send({"status": status, "detail": detail, "figures": dict(figures)})
        with selectors.DefaultSelector() as selector:  # select.select supports only 1024 descriptors
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while self._ended is None and self._process.poll() is None and time.monotonic() < deadline:
                selector.select(deadline - time.monotonic())
                self._receive()
        self._receive()
        if self._ended is None:
            if self._process.poll() is None:
                self._problem = f"its writer did not finish within {self.close_seconds:g} s"
            self._process.kill()
            self._warn_incomplete()
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()
        self._process.stdout.close()

    def summary_fields(self) -> dict[str, Any]:
        """Return the facts for `summary.json`: MLflow's run id once it is known, and whether MLflow is up to date."""
        path = self.run_dir / RUN_ID_FILE
        about: dict[str, Any] = {"tracking_uri": redact_uri(self.uri), "synced": self._ended is not None}
        if self._experiment_id:
            about["experiment_id"] = self._experiment_id
        if self._ended is None and self._problem:
            about["problem"] = self._problem
        about["blocked_seconds"] = round(self.blocked_seconds, 6)
        if self._ended:
            about |= {f"writer_{key}": round(self._ended[key], 3) for key in ("start_cpu_seconds", "cpu_seconds")}
        return {"mlflow_run_id": noted_id(path), "mlflow": about}

    def _working_folder(self) -> Path:
        """Return a working directory for the writer, since MLflow creates ./mlruns in it."""
        database = sqlite_file(self.uri)
        folder = self.run_dir if database is None else database.parent
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
        except OSError:  # it has ended; `_receive` reads its last message
            self._receive()

    def _receive(self) -> None:
        """Read the writer's messages without blocking."""
        if self._process is None or self._process.stdout is None or self._process.stdout.closed:
            return
        chunk = self._process.stdout.read(65536)
        if chunk == b"" and self._ended is None and not self._problem:
            self._warn(f"its writer ended: {self._last_words}")
        *lines, self._received = (self._received + (chunk or b"")).split(b"\n")
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:  # output of a library, kept in case it is the last
                self._last_words = line.decode(errors="replace").strip()[-500:]
                continue
            if event["event"] == "connected":
                self._experiment_id = event["experiment_id"]
            elif event["event"] == "trouble":
                self._warn(event["text"], event["advice"])
            elif event["event"] == "closed":
                self._ended = event

    def _warn_incomplete(self) -> None:
        """Warn at the end of the run that MLflow is incomplete, and how to sync it."""
        log.warning(
            "MLflow at %s is incomplete for this run (%s). The run's folder is complete; to sync it: %s",
            redact_uri(self.uri),
            self._problem,
            sync_command(self.run_dir),
        )

    def _warn(self, problem: str, advice: str = NO_ANSWER.advice) -> None:
        """Log the problem and the remedy once; keep the latest problem for the summary."""
        first, self._problem = not self._problem, redacted(problem)
        if first:
            log.warning(
                "MLflow at %s cannot be written (%s). Training continues, metrics.jsonl is complete, and MLflow is "
                "retried until the end. %s",
                redact_uri(self.uri),
                self._problem,
                advice,
            )


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def track_evaluations(config: Config, folder: Path) -> str:
    """Upload the evaluations in a run's folder that MLflow lacks; return the problem, or "" for success.

    Does nothing for a run that was not tracked. A failure of MLflow does not fail the evaluation; use `sync` later.
    """
    file = folder / RUN_ID_FILE
    if config.logger.name != "mlflow" or not file.is_file():
        return ""
    try:
        client = existing_store(tracking_uri(config))
        log_evaluations(client, file.read_text(encoding="utf-8").strip(), folder)
    except Exception as error:  # may be from requests, sqlalchemy or mlflow
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return ""
