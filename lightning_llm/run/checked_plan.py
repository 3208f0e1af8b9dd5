"""A verb's arguments -> the one plan it is about, past every check; all problems in one list before any work."""

import argparse

from lightning_llm.config.compose import read_composed, read_file
from lightning_llm.config.schema.partial import gather
from lightning_llm.config.schema.strict import Reading
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.plan.check import config_problems, disk_problems
from lightning_llm.plan.resolve import Plan, Resolution
from lightning_llm.run.environment import adopt_world, rank_environment
from lightning_llm.run.weights import init_problems


def read_arguments(arguments: argparse.Namespace) -> Reading:
    """Return the config that --config, or else the overrides and --config-dir, say. Raises ConfigError."""
    if arguments.config:
        return read_file(arguments.config, arguments.overrides, arguments.config_dir)
    return read_composed(arguments.overrides, arguments.config_dir)


def checked_plan(arguments: argparse.Namespace, *, to_train: bool) -> Plan:
    """Return the plan of one run, as the ranks that were started for it have it where it is `to_train`.

    Raises:
        ConfigError: with what is wrong with the keys, and between those that are right; against this machine and its
            disk, too, where it is `to_train`.
    """
    reading = read_arguments(arguments)
    if to_train and rank_environment() is not None:
        reading = Reading(adopt_world(reading.checked()))
    if reading.config is None:
        raise ConfigError(reading.problems)
    found = Resolution(reading.config, to_train=to_train)
    if problems := dict.fromkeys([*reading.problems, *problems_beyond(found)]):
        raise ConfigError(problems)
    return found.plan()


def problems_beyond(found: Resolution, *, jobs: int = 1) -> list[Problem]:
    """Return what the rules between keys say of the sound part of a config, one of `jobs` that share a disk."""
    problems = config_problems(found) + gather([lambda: init_problems(found.config)])
    return problems + (gather([lambda: disk_problems(found.config, jobs)]) if found.to_train else [])
