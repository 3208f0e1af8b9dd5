"""A run's numbers for Prometheus: an endpoint to scrape, and a file for node_exporter's textfile collector."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.version import __version__
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

    - `port` 0: any that is free; null: no endpoint. A job of a sweep always takes any that is free
    - `textfile`: the `.prom` file, or the folder in which each run has one. It stays, and says that the run ended
    - `targets`: a folder for Prometheus' `file_sd_configs`: a file in it has the address while the run is there
    - `every_seconds`: how often files are written, disk and checkpoints looked at, and a port in use tried again

    It is a `RunLogger` besides: the run's folder hands it what it writes. Nothing here ends a run or holds it up.

    Raises:
        ConfigError: prometheus_client is not installed, or an argument is none of these.
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
            text = f"is {self.port}, must be 0 (any that is free) to {HIGHEST_PORT}, or null for no endpoint."
            found.append(Problem("port", text))
        if self.port is None and self.textfile is None:
            found.append(Problem("port", "is null, and so is textfile: nobody would be told. Set one of them."))
        if self.port is None and self.targets is not None:
            found.append(Problem("targets", "tells of the endpoint, and port=null has none. Set port=0, or leave it."))
        if not self.every_seconds >= 0.1:
            found.append(Problem("every_seconds", f"is {self.every_seconds:g}, must be 0.1 at least."))
        return found

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Keep the config, before the run's folder is opened."""
        self._config = pl_module.config

    def open(self, facts: Mapping[str, Any], resumed_from_step: int | None) -> None:
        """Begin to serve and to write. The run's folder calls it, on rank 0 alone."""
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
        if is_among_jobs():  # which have one config, and may run at the same time
            port = None if port is None else 0
            textfile = textfile if textfile is None or own in textfile.name else textfile.with_name(f"{own}.prom")
        targets = None if self.targets is None else Path(self.targets, f"{own}.json")
        return Wishes(self.host, port, textfile, targets, self.every_seconds)

    def record(self, record: Record) -> None:
        """Take what metrics.jsonl has a line of by now."""
        if self._metrics is not None:
            self._metrics.take(record)

    def close(self, status: Status, detail: str, figures: Mapping[str, Any]) -> None:
        """Close the endpoint, and write the file a last time."""
        if self._metrics is not None and self._publisher is not None:
            self._metrics.end(status)
            self._publisher.stop()
        self._metrics = self._publisher = None

    def summary_fields(self) -> dict[str, Any]:
        """Return nothing: what was wrong is in the log."""
        return {}


def saved(run_dir: Path) -> Saved | None:
    """Return the newest checkpoint in a run's folder, None where there is none."""
    for folder in step_folders(run_dir / "checkpoints"):
        try:
            return Saved(step_of(folder), (folder / MANIFEST).stat().st_mtime)
        except FileNotFoundError:  # it has just been removed
            continue
    return None
