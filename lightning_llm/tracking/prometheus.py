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
"""Labels of every sample: several runs may be read from one machine."""


class Family(NamedTuple):
    """One metric: what it says, its `kind`, and its `label` beside `IDENTITY`, if it has one.

    `key` is of records: the metric is that number times `scale`. A key that ends with a slash is a prefix, and what
    follows it is the value of `label`.
    """

    text: str
    key: str = ""
    scale: float = 1.0
    label: str = ""
    kind: Literal["gauge", "counter", "info"] = "gauge"


FAMILIES = {
    "run_info": Family("Recipe, precision, model, config hash and version of the run, as labels; 1", kind="info"),
    "running": Family("1 while the run trains, 0 once it has ended"),
    "end_status": Family("1 under the status that the run ended with: finished, stopped or failed", label="status"),
    "start_timestamp_seconds": Family("When this start of the run began, since the epoch"),
    "end_timestamp_seconds": Family("When it ended, since the epoch"),
    "heartbeat_timestamp_seconds": Family("When these figures were written, since the epoch"),
    "last_record_timestamp_seconds": Family("Time of the newest record, before the first that of the start"),
    "max_steps": Family("Step that the run ends at"),
    "starts_total": Family("Starts of the run in its folder", kind="counter"),
    "rollbacks_total": Family("Times that spikes.policy=rollback has gone back, over all starts", kind="counter"),
    "restarts_total": Family("Times that lost ranks were started again, over all starts", kind="counter"),
    "steps_total": Family("Optimizer steps made by this start", kind="counter"),
    "tokens_total": Family("Tokens trained on by this start", kind="counter"),
    "skipped_steps_total": Family("Steps of this start whose update was left out", kind="counter"),
    "events_total": Family("Records of this start with an event, by its kind", label="kind", kind="counter"),
    "step": Family("Newest step, over all starts", "step"),
    "trained_tokens": Family("Tokens trained on up to the newest step, over all starts", "tokens"),
    "loss": Family("Training loss of the newest step, nats per token", "loss"),
    "grad_norm": Family("Gradient norm of the newest step before clipping", "grad_norm"),
    "learning_rate": Family("Learning rate of the newest step", "lr"),
    "loss_scale": Family("Loss scale of fp16", "loss_scale"),
    "val_loss": Family("Validation loss over all sources, nats per token", "val_loss"),
    "val_loss_by_source": Family("Validation loss of a source, nats per token", "val_loss/", label="source"),
    "forgetting": Family("Validation loss of a source less its first one, nats per token", "forgetting/", 1, "source"),
    "step_seconds": Family("Wall time of the newest step", "step_seconds"),
    "data_seconds": Family("Of that, waiting for the batch", "data_seconds"),
    "compute_seconds": Family("Of that, forward, backward and update", "compute_seconds"),
    "tokens_per_second": Family("Tokens per second of the newest step, all ranks", "tokens_per_second"),
    "flops_per_second": Family("Model FLOP/s of the newest step, all ranks", "tflops_per_second", 1e12),
    "mfu_ratio": Family("Model FLOP/s over the devices' dense peak", "mfu"),
    "rank_compute_seconds": Family("A rank's computing in a step, of late: median", "rank_compute_seconds/", 1, "rank"),
    "rank_wait_seconds": Family("A rank's waiting for others in a step: mean", "rank_wait_seconds/", 1, "rank"),
    "rank_data_seconds": Family("A rank's waiting for its batch in a step: mean", "rank_data_seconds/", 1, "rank"),
    "rank_jitter_ratio": Family("95th percentile of its computing over the median, less 1", "rank_jitter/", 1, "rank"),
    "straggler_ratio": Family("Share of a step that others wait for it; 0: no more", "straggler/", 1, "rank"),
    "timing_warmup": Family("1 where the newest step is no measure of speed", "timing_warmup"),
    "host_memory_bytes": Family("Resident memory of rank 0", "system/rss_bytes"),
    "host_memory_peak_bytes": Family("Its peak", "host_memory_peak_bytes"),
    "host_available_bytes": Family("Memory that rank 0's machine has left", "system/available_bytes"),
    "host_cpu_ratio": Family("Share of the machine's processor time in use", "system/cpu_percent", 0.01),
    "process_cpu_cores": Family("Processor cores that rank 0 keeps busy", "system/process_cpu_percent", 0.01),
    "device_memory_bytes": Family("Memory in use on rank 0's GPU", "system/gpu_memory_bytes"),
    "device_memory_peak_bytes": Family("Peak of PyTorch's allocator on it", "device_memory_peak_bytes"),
    "device_busy_ratio": Family("Share of the time that a kernel ran on it", "system/gpu_percent", 0.01),
    "device_power_watts": Family("Power of rank 0's GPU", "system/gpu_watts"),
    "checkpoint_step": Family("Step of the newest whole checkpoint in the run's folder"),
    "checkpoint_timestamp_seconds": Family("When that was saved, since the epoch"),
    "disk_free_bytes": Family("Bytes left where the run's folder lies"),
    "disk_size_bytes": Family("Bytes of that file system"),
    "record": Family("Newest value of any other number of metrics.jsonl, by its key there", label="key"),
}
"""All metrics by their names without `PREFIX`."""

EVENT_KINDS = ("spike", "plateau_shift", "divergence", "non_finite", "forgetting", "straggler")
"""Those that are counted from 0 on: an increase is only seen of what was there before."""
UNMADE = ("stop", "rollback")
"""Values of `event_action` in the record of a step that was not made."""
APART = ("time", "skipped")
"""Numbers of records that are told otherwise: as last_record_timestamp_seconds and skipped_steps_total."""

_BY_KEY = {each.key: name for name, each in FAMILIES.items() if each.key and not each.key.endswith("/")}
_BY_PREFIX = {each.key: name for name, each in FAMILIES.items() if each.key.endswith("/")}


def metric_of(key: str) -> tuple[str, str]:
    """Return the metric of the number at `key` of a record, without `PREFIX`, and its label's value ("": none)."""
    if key in _BY_KEY:
        return _BY_KEY[key], ""
    for prefix, name in _BY_PREFIX.items():
        if key.startswith(prefix):
            return name, key.removeprefix(prefix)
    return "record", key


class RunMetrics:
    """What the metrics of one run say by now. Training tells, other threads read.

    `identity` has the values of `IDENTITY`, `info` those of run_info's labels. `facts` is what summary.json says at the
    start. A number keeps its newest value, but those of steps that had an event: they go with the next record.
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
        """Take one record."""
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
        before = tokens * (step - 1) / step if self._tokens is None else self._tokens  # of the first: a step's share
        self._tokens = tokens
        self._values["steps_total", ""] += 1
        self._values["tokens_total", ""] += tokens - before
        self._values["skipped_steps_total", ""] += bool(record.get("skipped"))

    def set(self, **values: float | None) -> None:
        """Set metrics without a label of their own; None: it is not known any more."""
        with self._lock:
            for name, value in values.items():
                if value is None:
                    self._values.pop((name, ""), None)
                else:
                    self._values[name, ""] = value

    def end(self, status: Status) -> None:
        """Say that the run has ended."""
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
"""How long a run waits for the endpoint to be there, at its start."""
CLOSE_SECONDS = 10.0
"""How long an ending run waits for its last figures to be written."""
REQUEST_SECONDS = 10.0
"""How long a request may take: one that never ends would keep its thread."""

_LISTENING: "weakref.WeakSet[Any]" = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the sockets in a process that is forked, a loader's worker say: the port would be its parent's no more."""
    for each in list(_LISTENING):
        each.close()


os.register_at_fork(after_in_child=_close_in_child)


class Saved(NamedTuple):
    """The newest checkpoint: its step, and when it was written, in seconds since the epoch."""

    step: int
    time: float


@dataclass(frozen=True)
class Wishes:
    """Where metrics go: `textfile` is a path, `targets` the file that tells Prometheus of the endpoint.

    `port` None: no endpoint, 0: any free port.
    """

    host: str
    port: int | None
    textfile: Path | None
    targets: Path | None
    every_seconds: float


class MetricsPublisher:
    """Publishes `metrics` of the run in `run_dir` between `start` and `stop`; `saved` finds its newest checkpoint.

    `name` is how messages name what asked for it. A failure is said once, and tried again every `every_seconds`.
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
        """Begin; the endpoint is there, or could not be made, where that took less than `START_SECONDS`."""
        self._thread.start()
        self._first.wait(START_SECONDS)

    def stop(self) -> None:
        """Close the endpoint and write the file a last time, within `CLOSE_SECONDS`."""
        self._stopping.set()
        self._attempt(self._leave, "the endpoint")  # here: the thread may wait for a disk
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("%s: its last figures take longer than %g s to write: left alone", self.name, CLOSE_SECONDS)

    def _publish(self) -> None:
        while True:
            self._attempt(self._serve, "the endpoint")
            self._first.set()
            self._attempt(self._tell_targets, "the file of targets")
            self._attempt(self._look, "the figures of the run's folder")
            self._attempt(self._write, "the text file")
            if self._stopping.wait(self.wishes.every_seconds):
                break
        self._attempt(self._forget_targets, "the file of targets")
        self._attempt(self._look, "the figures of the run's folder")
        self._attempt(self._write, "the text file")

    def _attempt(self, action: Callable[[], None], what: str) -> None:
        try:
            action()
        except Exception as error:  # whatever it is, the run goes on
            if isinstance(error, OSError) and error.strerror:
                text = error.strerror + (f": {error.filename}" if error.filename else "")
            else:
                text = f"{type(error).__name__}: {error}"
            self._say(f"{what} failed ({redacted(text)}). Training goes on, and it is tried again")

    def _say(self, text: str) -> None:
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
            again = f"Training goes on, and it is tried again every {self.wishes.every_seconds:g} s"
            text = f"port {port} of {host} cannot be listened on ({error.strerror}). Set {self.name}.port to another, "
            self._say(f"{text}or to 0 for any free one. {again}")
            return
        handler = cast(type, server.RequestHandlerClass)
        server.RequestHandlerClass = type("Handler", (handler,), {"timeout": REQUEST_SECONDS})
        _LISTENING.add(server.socket)
        self._server = server, thread
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{server.server_port}"
        print(f"scrape http://{self.address}/metrics", flush=True)
        if self._stopping.is_set():  # while a name was looked up, say
            self._leave()

    def _leave(self) -> None:
        """Close the endpoint; done twice it is done once."""
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
        # What others reach it by, where it listens on all addresses: the machine's name.
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
