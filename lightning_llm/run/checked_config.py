"""What a verb was given -> the one config it is about, past every check; all problems in one list before any work."""

import argparse

from lightning_llm.config.compose import read_file, read_words
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.partial import gather
from lightning_llm.config.schema.strict import Reading
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.plan.check import config_problems, disk_problems
from lightning_llm.plan.nodes import with_reduction
from lightning_llm.run.environment import adopt_world, rank_environment


def read_arguments(arguments: argparse.Namespace) -> Reading:
    """Return the config that --config, or else the overrides and --config-dir, say. Raises ConfigError."""
    if arguments.config:
        return read_file(arguments.config, arguments.overrides, arguments.config_dir)
    return read_words(arguments.overrides, arguments.config_dir)


def checked_config(arguments: argparse.Namespace, *, to_train: bool) -> Config:
    """Return the config of one run, as the ranks that were started for it have it where it is `to_train`.

    Raises:
        ConfigError: with what is wrong with the keys, and between those that are right; against this machine and its
            disk, too, where it is `to_train`.
    """
    reading = read_arguments(arguments)
    if to_train and rank_environment() is not None:
        reading = Reading(adopt_world(reading.checked()))
    problems = dict.fromkeys([*reading.problems, *problems_beyond(reading, to_train=to_train)])
    if problems or reading.config is None:
        raise ConfigError(problems)
    return with_reduction(reading.config)


def problems_beyond(reading: Reading, *, to_train: bool, jobs: int = 1) -> list[Problem]:
    """Return what the rules between keys say of the sound part of `reading`, one of `jobs` that share a disk."""
    config = reading.config
    if config is None:
        return []
    found = config_problems(config, to_train)
    return found + (gather([lambda: disk_problems(config, jobs)]) if to_train else [])
