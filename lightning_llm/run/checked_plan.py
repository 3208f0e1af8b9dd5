"""From a verb's arguments to a checked plan. All problems are raised in one list before any work."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.compose import read_composed
from lightning_llm.config.from_file import read_file
from lightning_llm.config.schema.validation import ParsedConfig, gather
from lightning_llm.plan.check import config_problems
from lightning_llm.plan.checkpoints import disk_problems
from lightning_llm.plan.resolve import DerivedConfig, Plan
from lightning_llm.run.launch.environment import adopt_world, rank_environment
from lightning_llm.run.launch.local_ranks import is_started_again, with_auto_resume
from lightning_llm.run.resume.branch import branch_problems, with_branch_resolved
from lightning_llm.run.resume.weights import init_problems, unnamed_problems


def read_arguments(arguments: argparse.Namespace) -> ParsedConfig:
    """Return the config given by --config, or by overrides and --config-dir. Raises ConfigError."""
    return read_config(arguments.overrides, arguments.config, arguments.config_dir)


def read_config(overrides: Sequence[str], file: Path | None, config_dir: Path | None) -> ParsedConfig:
    """Return the config of `file` (a run's config.yaml) or, without it, composed of the shipped groups and
    `config_dir`.

    `overrides` are applied in both cases.

    Raises:
        ConfigError: the input is too broken to return a partial config.
    """
    if file:
        return read_file(file, overrides, config_dir)
    return read_composed(overrides, config_dir)


def checked_plan(arguments: argparse.Namespace, *, to_train: bool) -> Plan:
    """Return the plan of one run; with `to_train`, for the ranks that were started for it.

    Raises:
        ConfigError: with invalid keys and conflicts between keys; with `to_train`, also with conflicts with this
            machine and its disk.
    """
    return checked_resolution(read_arguments(arguments), to_train=to_train).plan()


def checked_resolution(
    reading: ParsedConfig, *, to_train: bool, saves: bool = True, by_launcher: bool = False
) -> DerivedConfig:
    """Check a parsed config; return it with everything derived from it. Raises ConfigError as `checked_plan` does.

    `to_train`: the config is about to be trained, so this machine, its disk and the started ranks are checked, too.
    `saves`: whether checkpoints will be written, which need disk space. `by_launcher`: whether `launcher` decides where
    ranks run; Ray may place them on machines unlike this one.
    """
    if to_train and (rank_environment() is not None or is_started_again()):
        config = adopt_world(reading.checked())
        reading = ParsedConfig(with_auto_resume(config) if is_started_again() else config)
    reading = with_branch_resolved(reading)
    if reading.config is None:
        raise ConfigError(reading.problems)
    on_ray = by_launcher and rank_environment() is None and reading.config.launcher.name == "ray"
    found = DerivedConfig(reading.config, to_train=to_train and not on_ray)
    if problems := dict.fromkeys([*reading.problems, *problems_beyond(found, saves=saves)]):
        raise ConfigError(problems)
    return found


def problems_beyond(found: DerivedConfig, *, jobs: int = 1, saves: bool = True) -> list[Problem]:
    """Return the problems of a config whose keys are valid each: conflicts between keys, weights, parent run, disk
    space.

    `jobs`: number of jobs that will write to the same disk. `saves`: as in `checked_resolution`.
    """
    problems = config_problems(found)
    problems += gather([lambda: init_problems(found.config), lambda: branch_problems(found.config)])
    problems += gather([lambda: unnamed_problems(found.config)]) if found.to_train else []
    return problems + (gather([lambda: disk_problems(found.config, jobs)]) if found.to_train and saves else [])
