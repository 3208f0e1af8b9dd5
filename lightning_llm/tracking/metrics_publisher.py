"""A thread that brings a run's metrics to Prometheus: an HTTP endpoint, a file for node_exporter, or both.

It does whatever may take long (names, disks that are away), so that training waits for none of it, and ends no run.
"""

import json
import logging
import os
import shutil
import socket
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from lightning_llm.config.redact import redacted
from lightning_llm.tracking.metric_families import RunMetrics

log = logging.getLogger(__name__)

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
        _replace(file, json.dumps([{"targets": [address]}]).encode() + b"\n")

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
            _replace(self.wishes.textfile, generate_latest(self._registry))


def _replace(path: Path, content: bytes) -> None:
    """Write `content` to `path` in one move: who reads it sees the old file or the new one, whole."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)
