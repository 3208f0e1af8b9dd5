"""A verb's arguments -> the one plan it is about, past every check; all problems in one list before any work."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.compose import read_composed
from lightning_llm.config.from_file import read_file
from lightning_llm.config.schema.strict import Reading, gather
from lightning_llm.plan.check import config_problems
from lightning_llm.plan.checkpoints import disk_problems
from lightning_llm.plan.resolve import Plan, Resolution
from lightning_llm.run.launch.environment import adopt_world, rank_environment
from lightning_llm.run.launch.local_ranks import goes_on, is_started_again
from lightning_llm.run.resume.branch import branch_problems, settled
from lightning_llm.run.resume.weights import init_problems, unnamed_problems


def read_arguments(arguments: argparse.Namespace) -> Reading:
    """Return the config that --config, or else the overrides and --config-dir, say. Raises ConfigError."""
    return read_words(arguments.overrides, arguments.config, arguments.config_dir)


def read_words(overrides: Sequence[str], file: Path | None, config_dir: Path | None) -> Reading:
    """Return the config that `file`, a run's config.yaml, or else the shipped groups and `config_dir` give.

    Raises:
        ConfigError: where nothing is left to go on with.
    """
    if file:
        return read_file(file, overrides, config_dir)
    return read_composed(overrides, config_dir)


def checked_plan(arguments: argparse.Namespace, *, to_train: bool) -> Plan:
    """Return the plan of one run, as the ranks that were started for it have it where it is `to_train`.

    Raises:
        ConfigError: with what is wrong with the keys, and between those that are right; against this machine and its
            disk, too, where it is `to_train`.
    """
    return checked_resolution(read_arguments(arguments), to_train=to_train).plan()


def checked_resolution(
    reading: Reading, *, to_train: bool, saves: bool = True, by_launcher: bool = False
) -> Resolution:
    """Return what follows from a config that every check has passed. Raises ConfigError as `checked_plan` does.

    `saves`: whether checkpoints will be written, for which the disk needs room. `by_launcher`: whether `launcher` says
    where ranks run: what the machines are on which Ray places them is not known on this one.
    """
    if to_train and (rank_environment() is not None or is_started_again()):
        config = adopt_world(reading.checked())
        reading = Reading(goes_on(config) if is_started_again() else config)
    reading = settled(reading)
    if reading.config is None:
        raise ConfigError(reading.problems)
    elsewhere = by_launcher and rank_environment() is None and reading.config.launcher.name == "ray"
    found = Resolution(reading.config, to_train=to_train and not elsewhere)
    if problems := dict.fromkeys([*reading.problems, *problems_beyond(found, saves=saves)]):
        raise ConfigError(problems)
    return found


def problems_beyond(found: Resolution, *, jobs: int = 1, saves: bool = True) -> list[Problem]:
    """Return what the rules between keys say of the sound part of a config, one of `jobs` that share a disk."""
    problems = config_problems(found)
    problems += gather([lambda: init_problems(found.config), lambda: branch_problems(found.config)])
    problems += gather([lambda: unnamed_problems(found.config)]) if found.to_train else []
    return problems + (gather([lambda: disk_problems(found.config, jobs)]) if found.to_train and saves else [])
