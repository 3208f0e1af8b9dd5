"""`python -m lightning_llm.run.launch.node_agent REPORT`: run the ranks of one machine for Ray.

Reads its `Task` from stdin as JSON, runs torch's agent, and writes failures to the file REPORT.
"""

import json
import os
import platform
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError
from lightning_llm.base.imports import slow_imports
from lightning_llm.base.signals import die_with_parent
from lightning_llm.config.from_file import load_config
from lightning_llm.config.redact import redacted
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import open_config_dir
from lightning_llm.config.yaml_file import in_memory
from lightning_llm.parallel.cuda_environment import set_allocator, set_missing, wanted
from lightning_llm.plan.resolve import DerivedConfig
from lightning_llm.run.launch.local_ranks import SAVE_SECONDS, passed_on
from lightning_llm.run.launch.torch_agent import Node, launch_ranks


@dataclass(frozen=True)
class Task:
    """Work of one machine: `config` as YAML, `cpus` for its ranks, `node` in a run of several machines or None."""

    config: str
    config_dir: list[str]
    cpus: int
    node: dict[str, Any] | None
    quiet: bool

    def as_json(self) -> dict[str, Any]:
        """Return the task as JSON data."""
        return asdict(self)


def main() -> int:
    """Run the ranks until all have ended; return 0, or write a report and return 1 after a failure or a signal.

    2: the config is not valid on this machine (reported on stderr).
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # it is started by a thread of Ray with SIGINT blocked
    die_with_parent()
    report, task = Path(sys.argv[1]), Task(**json.load(sys.stdin))
    try:
        config = _read(task)
        set_allocator()
        set_missing(wanted(DerivedConfig(config, to_train=True).plan()))
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: on {platform.node()}: {redacted(str(problem))}", file=sys.stderr)
        return 2
    found = _run(config, task)
    report.write_text(json.dumps(found), encoding="utf-8")
    return 1 if found else 0


def _read(task: Task) -> Config:
    open_config_dir(Path(task.config_dir[1]) if task.config_dir else None)
    with os.fdopen(os.memfd_create("task.yaml"), "wb") as file:
        file.write(task.config.encode())
        file.flush()
        return load_config(Path(f"/proc/{os.getpid()}/fd/{file.fileno()}"), [])


def _run(config: Config, task: Task) -> dict[str, Any]:
    """Return {} if all ranks succeeded, else the received signal or the failures by rank."""
    with slow_imports():
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    count, node = config.trainer.devices, Node(**task.node) if task.node else None
    threads = config.trainer.threads or max(1, task.cpus // count)
    try:
        with in_memory(config) as file, passed_on(Path(config.run.dir)):
            words = "train", "--config", str(file), *task.config_dir
            seconds = SAVE_SECONDS
            launch_ranks(count, words, threads=threads, shutdown_seconds=seconds, quiet=task.quiet, node=node)
    except SignalException as stop:
        return {"signal": int(stop.sigval)}
    except ChildFailedError as error:
        return {"failures": {rank: _as_data(failure) for rank, failure in error.failures.items()}}
    return {}


def _as_data(failure: Any) -> dict[str, Any]:
    return {
        "local_rank": failure.local_rank,
        "pid": failure.pid,
        "exitcode": failure.exitcode,
        "timestamp": failure.timestamp,
        "error": failure.error_file_data if isinstance(failure.message, dict) else None,
    }


if __name__ == "__main__":
    sys.exit(main())
