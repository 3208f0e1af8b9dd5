"""`train -m`: every combination of a sweep, checked before the first starts, each run in a process of its own."""

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from lightning_llm.check import check_config, check_disk
from lightning_llm.compose import compose_sweep
from lightning_llm.config_file import write_config
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.schema import Config


def sweep(arguments: argparse.Namespace) -> int:
    """Run every job in `run.root/experiment/<time>/<n>`; return 0, 1 where a job failed, or 128 + a signal.

    A signal is passed on to the job under way, which saves and stops; the jobs after it are not started.
    """
    if arguments.config:
        raise ConfigError(Problem("--config", "is one resolved run; a sweep (-m) is composed. Give overrides instead."))
    jobs = _in_one_folder(compose_sweep(arguments.overrides, arguments.config_dir))
    _check_all([config for _, config in jobs])
    failed: list[tuple[int, str]] = []
    with _signals_passed_on() as relay:
        for number, (words, config) in enumerate(jobs):
            print(f"job    {number + 1}/{len(jobs)} {' '.join(words)}", flush=True)
            code = _run(config, relay)
            if relay.received:
                print(f"stopped in job {number + 1} of {len(jobs)}: {config.run.dir}", file=sys.stderr)
                return 128 + relay.received
            if code:
                failed.append((code, config.run.dir))
    print(f"sweep  {len(jobs) - len(failed)} of {len(jobs)} jobs finished, in {Path(jobs[0][1].run.dir).parent}")
    for code, folder in failed:
        print(f"  exit code {code}: {folder}", file=sys.stderr)
    return 1 if failed else 0


def _in_one_folder(jobs: list[tuple[list[str], Config]]) -> list[tuple[list[str], Config]]:
    first = jobs[0][1].run
    folder = Path(first.root) / first.experiment / datetime.now().strftime("%Y%m%d-%H%M%S")
    placed = []
    for number, (words, config) in enumerate(jobs):
        run = config.run.model_copy(update={"dir": str(folder / str(number))})
        placed.append((words, config.model_copy(update={"run": run})))
    return placed


def _check_all(configs: list[Config]) -> None:
    problems: dict[Problem, None] = {}
    for config in configs:
        try:
            check_config(config)
            check_disk(config, jobs=len(configs))
        except ConfigError as error:
            problems.update(dict.fromkeys(error.problems))
    if problems:
        raise ConfigError(problems)


class _Relay:
    """Hands SIGINT and SIGTERM to the job under way, whenever they come; `received`: the first of them, or 0."""

    def __init__(self) -> None:
        self.received = 0
        self.job: subprocess.Popen[bytes] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if self.job is not None:
            self.job.send_signal(number)


@contextmanager
def _signals_passed_on() -> Iterator[_Relay]:
    relay = _Relay()
    before: dict[Any, Any] = {number: signal.signal(number, relay) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield relay
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(config: Config, relay: _Relay) -> int:
    folder = Path(config.run.dir)
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.with_suffix(".yaml")
    write_config(config, file)
    command = [sys.executable, "-m", "lightning_llm", "train", "--config", str(file)]
    # In a process group of its own: a terminal's Ctrl-C would reach it beside ours, and the second one stops at once.
    relay.job = subprocess.Popen(command, process_group=0)
    code = relay.job.wait()
    relay.job = None
    file.unlink()  # the folder holds it as config.yaml
    return code if code >= 0 else 128 - code
