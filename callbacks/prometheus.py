"""Prometheus metrics of a run: an endpoint to scrape, and a file for node_exporter's textfile collector."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_llm.base import __version__
from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.config_hash import config_hash
from lightning_llm.config.schema import Config
from lightning_llm.tracking.files import Record, Status
from lightning_llm.tracking.prometheus import MetricsPublisher, RunMetrics, Saved, Wishes
from lightning_llm.tracking.run_state import is_among_jobs
from lightning_llm.train.checkpoint.manifest import MANIFEST, step_folders, step_of

NAME = "callbacks.prometheus"
HIGHEST_PORT = 65535


class Prometheus(pl.Callback):
    """Rank 0 serves every record's numbers at `http://HOST:PORT/metrics`, and writes them to a file.

    - `port` 0: any free port; null: no endpoint. Jobs of a sweep always use any free port
    - `textfile`: the `.prom` file, or a folder with one file per run. It remains after the run and reports its end
    - `targets`: a folder for Prometheus' `file_sd_configs`, in which a file has the address while the run exists
    - `every_seconds`: interval at which files are written, disk and checkpoints checked, and a port in use tried again

    It is also a `RunLogger`: it receives the records that the run's folder writes. It never ends or delays a run.

    Raises:
        ConfigError: prometheus_client is not installed, or an argument is invalid.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int | None = 9877,
        textfile: str | None = None,
        targets: str | None = None,
        every_seconds: float = 15.0,
    ):
        self.host, self.port, self.textfile, self.targets = host, port, textfile, targets
        self.every_seconds = every_seconds
        self._config: Config
        self._metrics: RunMetrics | None = None
        self._publisher: MetricsPublisher | None = None
        if problems := list(self._problems()):
            raise ConfigError(problems)

    def _problems(self) -> list[Problem]:
        found = []
        if find_spec("prometheus_client") is None:
            text = "needs the package prometheus_client, which is missing: pip install 'lightning-llm[prometheus]'."
            found.append(Problem("_target_", text))
        if not self.host:
            found.append(Problem("host", "is empty. Name an address of this machine: 127.0.0.1, 0.0.0.0 for all."))
        if self.port is not None and not 0 <= self.port <= HIGHEST_PORT:
            text = f"must be 0 (any free port) to {HIGHEST_PORT}, or null for no endpoint."
            found.append(Problem("port", text, self.port))
        if self.port is None and self.textfile is None:
            found.append(Problem("port", "is null, and so is textfile, so there is no output. Set one of them."))
        if self.port is None and self.targets is not None:
            found.append(Problem("targets", "needs an endpoint, but port is null. Set port=0, or remove targets."))
        if not self.every_seconds >= 0.1:
            found.append(Problem("every_seconds", "must be at least 0.1.", f"{self.every_seconds:g}"))
        return found

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Keep the config, before the run's folder is opened."""
        self._config = pl_module.config

    def open(self, facts: Mapping[str, Any], resumed_from_step: int | None) -> None:
        """Start to serve and to write. Called by the run's folder, on rank 0 only."""
        config = self._config
        folder = Path(config.run.dir)
        identity = {"experiment": config.run.experiment, "run": config.run.name}
        info = {
            "recipe": config.recipe or "",
            "precision": config.precision.name,
            "model": config.model.name,
            "config_hash": config_hash(config),
            "device": str(facts.get("device", "")),
            "version": __version__,
        }
        self._metrics = RunMetrics(identity, info, config.trainer.max_steps, facts)
        self._publisher = MetricsPublisher(self._metrics, self._wishes(identity), folder, lambda: saved(folder), NAME)
        self._publisher.start()

    def _wishes(self, identity: Mapping[str, str]) -> Wishes:
        own = "lightning_llm-" + re.sub(r"[^\w.=-]", "_", "-".join(identity.values()))
        port, textfile = self.port, None if self.textfile is None else Path(self.textfile)
        if textfile is not None and textfile.suffix != ".prom":
            textfile = textfile / f"{own}.prom"
        if is_among_jobs():  # they share one config and may run at the same time
            port = None if port is None else 0
            textfile = textfile if textfile is None or own in textfile.name else textfile.with_name(f"{own}.prom")
        targets = None if self.targets is None else Path(self.targets, f"{own}.json")
        return Wishes(self.host, port, textfile, targets, self.every_seconds)

    def record(self, record: Record) -> None:
        """Receive a record that is already in metrics.jsonl."""
        if self._metrics is not None:
            self._metrics.take(record)

    def close(self, status: Status, detail: str, figures: Mapping[str, Any]) -> None:
        """Close the endpoint, and write the file a last time."""
        if self._metrics is not None and self._publisher is not None:
            self._metrics.end(status)
            self._publisher.stop()
        self._metrics = self._publisher = None

    def summary_fields(self) -> dict[str, Any]:
        """Return nothing: errors are in the log."""
        return {}


def saved(run_dir: Path) -> Saved | None:
    """Return the newest checkpoint in a run's folder, None if there is none."""
    for folder in step_folders(run_dir / "checkpoints"):
        try:
            return Saved(step_of(folder), (folder / MANIFEST).stat().st_mtime)
        except FileNotFoundError:  # it has just been removed
            continue
    return None
