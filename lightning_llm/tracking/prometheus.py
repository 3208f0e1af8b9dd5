"""Metrics of a run for Prometheus, and the thread that publishes them: an endpoint, a textfile, or both. No torch."""

import json
import logging
import os
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from lightning_llm.config.redact import redacted
from lightning_llm.tracking.files import Record, Status, replace_file

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

PREFIX = "lightning_llm_"
IDENTITY = ("experiment", "run")
"""Labels of every sample, which tell runs on one machine apart."""


class Family(NamedTuple):
    """Description of one Prometheus metric: its help text, its `kind`, and its `label` besides `IDENTITY`, if any.

    The value is the number at `key` of a record times `scale`. A key that ends with a slash is a prefix; the rest of
    the record's key is then the value of `label`.
    """

    text: str
    key: str = ""
    scale: float = 1.0
    label: str = ""
    kind: Literal["gauge", "counter", "info"] = "gauge"


FAMILIES = {
    "run_info": Family("Recipe, precision, model, config hash and version of the run, as labels; 1", kind="info"),
    "running": Family("1 while the run trains, 0 once it has ended"),
    "end_status": Family("1 for the status that the run ended with: finished, stopped or failed", label="status"),
    "start_timestamp_seconds": Family("Start time of this session, seconds since the epoch"),
    "end_timestamp_seconds": Family("End time of this session, seconds since the epoch"),
    "heartbeat_timestamp_seconds": Family("Time when these metrics were written, seconds since the epoch"),
    "last_record_timestamp_seconds": Family("Time of the newest record, or of the start if there is none"),
    "max_steps": Family("Last step of the run (trainer.max_steps)"),
    "starts_total": Family("Sessions of the run in its folder", kind="counter"),
    "rollbacks_total": Family("Rollbacks by spikes.policy=rollback, over all sessions", kind="counter"),
    "restarts_total": Family("Restarts of lost ranks, over all sessions", kind="counter"),
    "steps_total": Family("Optimizer steps of this session", kind="counter"),
    "tokens_total": Family("Tokens trained on in this session", kind="counter"),
    "skipped_steps_total": Family("Steps of this session with a skipped update", kind="counter"),
    "events_total": Family("Records of this session with an event, by kind", label="kind", kind="counter"),
    "step": Family("Newest step, over all sessions", "step"),
    "trained_tokens": Family("Tokens trained on up to the newest step, over all sessions", "tokens"),
    "loss": Family("Training loss of the newest step, nats per token", "loss"),
    "grad_norm": Family("Gradient norm of the newest step before clipping", "grad_norm"),
    "learning_rate": Family("Learning rate of the newest step", "lr"),
    "loss_scale": Family("Loss scale of fp16", "loss_scale"),
    "val_loss": Family("Validation loss over all sources, nats per token", "val_loss"),
    "val_loss_by_source": Family("Validation loss of a source, nats per token", "val_loss/", label="source"),
    "forgetting": Family("Validation loss of a source minus its first one, nats per token", "forgetting/", 1, "source"),
    "step_seconds": Family("Wall time of the newest step", "step_seconds"),
    "data_seconds": Family("Part of it spent waiting for the batch", "data_seconds"),
    "compute_seconds": Family("Part of it spent on forward, backward and update", "compute_seconds"),
    "tokens_per_second": Family("Tokens per second of the newest step, all ranks", "tokens_per_second"),
    "flops_per_second": Family("Model FLOP/s of the newest step, all ranks", "tflops_per_second", 1e12),
    "mfu_ratio": Family("Model FLOP/s over the devices' dense peak", "mfu"),
    "rank_compute_seconds": Family("A rank's recent compute time per step: median", "rank_compute_seconds/", 1, "rank"),
    "rank_wait_seconds": Family("A rank's time waiting for others per step: mean", "rank_wait_seconds/", 1, "rank"),
    "rank_data_seconds": Family("A rank's time waiting for its batch per step: mean", "rank_data_seconds/", 1, "rank"),
    "rank_jitter_ratio": Family("95th percentile of its compute time / median - 1", "rank_jitter/", 1, "rank"),
    "straggler_ratio": Family("Share of a step that others wait for it; 0: recovered", "straggler/", 1, "rank"),
    "timing_warmup": Family("1 if the newest step does not count for timing", "timing_warmup"),
    "host_memory_bytes": Family("Resident memory of rank 0", "system/rss_bytes"),
    "host_memory_peak_bytes": Family("Peak resident memory of rank 0", "host_memory_peak_bytes"),
    "host_available_bytes": Family("Available memory of rank 0's machine", "system/available_bytes"),
    "host_cpu_ratio": Family("Share of the machine's processor time in use", "system/cpu_percent", 0.01),
    "process_cpu_cores": Family("Processor cores that rank 0 keeps busy", "system/process_cpu_percent", 0.01),
    "device_memory_bytes": Family("Memory in use on rank 0's GPU", "system/gpu_memory_bytes"),
    "device_memory_peak_bytes": Family("Peak of PyTorch's allocator on that GPU", "device_memory_peak_bytes"),
    "device_busy_ratio": Family("Share of time with a running kernel on that GPU", "system/gpu_percent", 0.01),
    "device_power_watts": Family("Power of rank 0's GPU", "system/gpu_watts"),
    "checkpoint_step": Family("Step of the newest complete checkpoint in the run's folder"),
    "checkpoint_timestamp_seconds": Family("Time when it was saved, seconds since the epoch"),
    "disk_free_bytes": Family("Free bytes on the file system of the run's folder"),
    "disk_size_bytes": Family("Size of that file system in bytes"),
    "record": Family("Newest value of any other number in metrics.jsonl, by key", label="key"),
}
"""All metrics by their names without `PREFIX`."""

EVENT_KINDS = ("spike", "plateau_shift", "divergence", "non_finite", "forgetting", "straggler", "dead_experts")
"""Counters that are published as 0 from the start, so that Prometheus sees the first increase."""
UNMADE = ("stop", "rollback")
"""Values of `event_action` in the record of a step without an update."""
APART = ("time", "skipped")
"""Numbers of records published under other names: last_record_timestamp_seconds and skipped_steps_total."""

_BY_KEY = {each.key: name for name, each in FAMILIES.items() if each.key and not each.key.endswith("/")}
_BY_PREFIX = {each.key: name for name, each in FAMILIES.items() if each.key.endswith("/")}


def metric_of(key: str) -> tuple[str, str]:
    """Return (name of the metric without `PREFIX`, value of its label or "") for the number at `key` of a record."""
    if key in _BY_KEY:
        return _BY_KEY[key], ""
    for prefix, name in _BY_PREFIX.items():
        if key.startswith(prefix):
            return name, key.removeprefix(prefix)
    return "record", key


class RunMetrics:
    """Current metrics of one run. The training thread writes them, other threads read them.

    `identity` has the values of `IDENTITY`, `info` the labels of run_info. `facts` is the content of summary.json at
    the start. A number keeps its newest value, except numbers of steps with an event, which the next record removes.
    """

    def __init__(
        self, identity: Mapping[str, str], info: Mapping[str, str], max_steps: int, facts: Mapping[str, Any]
    ) -> None:
        self._identity = [str(identity[name]) for name in IDENTITY]
        self._info = dict(info)
        self._lock = threading.Lock()
        now = time.time()
        self._values: dict[tuple[str, str], float] = {
            ("running", ""): 1,
            ("start_timestamp_seconds", ""): now,
            ("last_record_timestamp_seconds", ""): now,
            ("max_steps", ""): max_steps,
            ("starts_total", ""): facts.get("starts", 1),
            ("rollbacks_total", ""): len(facts.get("rollbacks", ())),
            ("restarts_total", ""): len(facts.get("restarts", ())),
            **{(f"{name}_total", ""): 0 for name in ("steps", "tokens", "skipped_steps")},
            **{("events_total", kind): 0 for kind in EVENT_KINDS},
        }
        self._tokens: float | None = None

    def take(self, record: Record) -> None:
        """Update the metrics with one record."""
        numbers = {key: each for key, each in record.items() if isinstance(each, int | float) and key not in APART}
        found = {(name, label): self._scaled(name, numbers[key]) for key in numbers for name, label in [metric_of(key)]}
        with self._lock:
            for name, label in [each for each in self._values if each[0] == "record" and each[1].startswith("event")]:
                del self._values[name, label]
            self._values |= found
            self._values["last_record_timestamp_seconds", ""] = record.get("time", time.time())
            if "event" in record:
                kind = ("events_total", str(record["event"]))
                self._values[kind] = self._values.get(kind, 0) + 1
            if "loss" in record:
                self._count(record)

    def _count(self, record: Record) -> None:
        self._values["timing_warmup", ""] = int(record.get("timing_warmup", False))
        if record.get("event_action") in UNMADE:
            return
        step, tokens = record["step"], record.get("tokens", 0)
        before = tokens * (step - 1) / step if self._tokens is None else self._tokens  # assume equal steps
        self._tokens = tokens
        self._values["steps_total", ""] += 1
        self._values["tokens_total", ""] += tokens - before
        self._values["skipped_steps_total", ""] += bool(record.get("skipped"))

    def set(self, **values: float | None) -> None:
        """Set metrics without a label, by name; None removes a value that is unknown now."""
        with self._lock:
            for name, value in values.items():
                if value is None:
                    self._values.pop((name, ""), None)
                else:
                    self._values[name, ""] = value

    def end(self, status: Status) -> None:
        """Set the final status of the run."""
        with self._lock:
            self._values |= {("running", ""): 0, ("end_status", status): 1, ("end_timestamp_seconds", ""): time.time()}

    def collect(self) -> Iterator["Metric"]:
        """Yield the metrics that have a value, as prometheus_client's collectors do."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        with self._lock:
            values = {**self._values, ("heartbeat_timestamp_seconds", ""): time.time()}
        for name, family in FAMILIES.items():
            if family.kind == "info":
                info = InfoMetricFamily(PREFIX + name.removesuffix("_info"), family.text, labels=IDENTITY)
                info.add_metric(self._identity, self._info)
                yield info
                continue
            samples = {label: value for (of, label), value in values.items() if of == name}
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = kind(PREFIX + name, family.text, labels=[*IDENTITY, *filter(None, [family.label])])
            for label, value in samples.items():
                metric.add_metric([*self._identity, *([label] if family.label else [])], value)
            if samples:
                yield metric

    @staticmethod
    def _scaled(name: str, number: float) -> float:
        return float(number) * FAMILIES[name].scale


START_SECONDS = 2.0
"""Maximum time to wait for the endpoint at the start of a run."""
CLOSE_SECONDS = 10.0
"""Maximum time to wait for the last metrics to be written at the end of a run."""
REQUEST_SECONDS = 10.0
"""Timeout of a request, so that it cannot block its thread forever."""

_LISTENING: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the sockets in a forked process, such as a loader's worker, which would keep the port in use."""
    for each in list(_LISTENING):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)


class Saved(NamedTuple):
    """Newest checkpoint: its step and the time it was written, in seconds since the epoch."""

    step: int
    time: float


@dataclass(frozen=True)
class Wishes:
    """Requested destinations of the metrics.

    `textfile`: file to write for node_exporter. `targets`: file that announces the endpoint to Prometheus. `port`: port
    of the endpoint, 0 for any free one, None for no endpoint.
    """

    host: str
    port: int | None
    textfile: Path | None
    targets: Path | None
    every_seconds: float


class MetricsPublisher:
    """Thread that publishes the metrics of a run between `start` and `stop`.

    `saved` returns the newest checkpoint. `name` is the config key in messages. A failure is reported once and retried
    every `every_seconds`.
    """

    def __init__(
        self, metrics: RunMetrics, wishes: Wishes, run_dir: Path, saved: Callable[[], Saved | None], name: str
    ) -> None:
        from prometheus_client import CollectorRegistry

        self.metrics, self.wishes, self.run_dir, self.saved, self.name = metrics, wishes, run_dir, saved, name
        self.address: str | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(metrics)
        self._server: tuple[Any, threading.Thread] | None = None
        self._first, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._publish, name="prometheus", daemon=True)
        self._said: set[str] = set()

    def start(self) -> None:
        """Start the thread; wait up to `START_SECONDS` for the endpoint."""
        self._thread.start()
        self._first.wait(START_SECONDS)

    def stop(self) -> None:
        """Close the endpoint and write the file once more, within `CLOSE_SECONDS`."""
        self._stopping.set()
        self._attempt(self._leave, "the endpoint")  # not in the thread, which may wait for a disk
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("%s: writing the last metrics took longer than %g s: not waiting", self.name, CLOSE_SECONDS)

    def _publish(self) -> None:
        while True:
            self._attempt(self._serve, "the endpoint")
            self._first.set()
            self._attempt(self._tell_targets, "the targets file")
            self._attempt(self._look, "the metrics of the run's folder")
            self._attempt(self._write, "the text file")
            if self._stopping.wait(self.wishes.every_seconds):
                break
        self._attempt(self._forget_targets, "the targets file")
        self._attempt(self._look, "the metrics of the run's folder")
        self._attempt(self._write, "the text file")

    def _attempt(self, action: Callable[[], None], what: str) -> None:
        try:
            action()
        except Exception as error:  # must not stop the run
            if isinstance(error, OSError) and error.strerror:
                text = error.strerror + (f": {error.filename}" if error.filename else "")
            else:
                text = f"{type(error).__name__}: {error}"
            self._warn_once(f"{what} failed ({redacted(text)}). Training continues, and it is retried")

    def _warn_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning("%s: %s", self.name, text)

    def _serve(self) -> None:
        from prometheus_client import start_http_server

        host, port = self.wishes.host, self.wishes.port
        if port is None or self._server is not None or self._stopping.is_set():
            return
        try:
            server, thread = start_http_server(port, host, self._registry)
        except OSError as error:
            again = f"Training continues, and it is retried every {self.wishes.every_seconds:g} s"
            text = f"cannot listen on port {port} of {host} ({error.strerror}). Set {self.name}.port to another port, "
            self._warn_once(f"{text}or to 0 for any free one. {again}")
            return
        handler = cast(type, server.RequestHandlerClass)
        server.RequestHandlerClass = type("Handler", (handler,), {"timeout": REQUEST_SECONDS})
        _LISTENING.add(server.socket)
        self._server = server, thread
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{server.server_port}"
        print(f"scrape http://{self.address}/metrics", flush=True)
        if self._stopping.is_set():  # for example while a host name was resolved
            self._leave()

    def _leave(self) -> None:
        """Close the endpoint; may be called again."""
        if self._server is None:
            return
        server, thread = self._server
        server.shutdown()
        server.server_close()
        thread.join()
        self._server = None

    def _tell_targets(self) -> None:
        server, file = self._server, self.wishes.targets
        if server is None or file is None:
            return
        # An endpoint on all addresses is announced by the machine's name.
        everywhere = self.wishes.host in ("0.0.0.0", "::")
        address = f"{socket.gethostname()}:{server[0].server_port}" if everywhere else self.address
        replace_file(file, json.dumps([{"targets": [address]}]).encode() + b"\n")

    def _forget_targets(self) -> None:
        if self.wishes.targets is not None:
            self.wishes.targets.unlink(missing_ok=True)

    def _look(self) -> None:
        saved, disk = self.saved(), shutil.disk_usage(self.run_dir)
        self.metrics.set(
            disk_free_bytes=disk.free,
            disk_size_bytes=disk.total,
            checkpoint_step=None if saved is None else saved.step,
            checkpoint_timestamp_seconds=None if saved is None else saved.time,
        )

    def _write(self) -> None:
        from prometheus_client import generate_latest

        if self.wishes.textfile is not None:
            replace_file(self.wishes.textfile, generate_latest(self._registry))
