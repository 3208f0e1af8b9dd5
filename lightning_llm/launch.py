"""The verb `train`: compose, check, run. Nothing heavy is imported before the checks are through."""

import argparse
import subprocess
import sys
from pathlib import Path

import yaml

from lightning_llm.check import check_config, check_disk
from lightning_llm.compose import compose_config, compose_sweep, load_config, run_multirun
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.run_state import decide_start
from lightning_llm.schema import Config


def train(arguments: argparse.Namespace) -> int:
    """Train one run, or with -m one for each combination; return the exit code."""
    if arguments.multirun:
        return _sweep(arguments)
    if arguments.config:
        config = load_config(arguments.config, arguments.overrides)
    else:
        config = compose_config(arguments.overrides, arguments.config_dir)
    check_config(config)
    check_disk(config)
    start = decide_start(config)
    if start.finished:
        print(f"{config.run.dir} is finished at step {config.trainer.max_steps}; raise trainer.max_steps to go on")
        return 0
    from lightning_llm.run import run  # torch and Lightning: seconds

    return run(config, start)


def write_config(config: Config, file: Path) -> None:
    """Write `config` so that `train --config FILE` repeats the run; the file appears whole."""
    partial = file.with_suffix(".partial")
    partial.write_text(yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True), encoding="utf-8")
    partial.rename(file)


def _sweep(arguments: argparse.Namespace) -> int:
    if arguments.config:
        raise ConfigError(Problem("--config", "is one resolved run; a sweep (-m) is composed. Give overrides instead."))
    problems: dict[Problem, None] = {}
    for _, config in compose_sweep(arguments.overrides, arguments.config_dir):
        try:
            check_config(config)
            check_disk(config)
        except ConfigError as error:
            problems.update(dict.fromkeys(error.problems))
    if problems:
        raise ConfigError(problems)
    return run_multirun(arguments.overrides, arguments.config_dir, _child)


def _child(config: Config) -> None:
    """Run one job of a sweep in a process of its own, so that no job inherits another's state."""
    folder = Path(config.run.dir)
    folder.parent.mkdir(parents=True, exist_ok=True)
    file = folder.parent / f"{folder.name}.yaml"
    write_config(config, file)
    command = [sys.executable, "-m", "lightning_llm", "train", "--config", str(file)]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise RuntimeError(f"{config.run.dir} ended with exit code {code}")
