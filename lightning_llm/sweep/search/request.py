"""The request of a search (`sweep.search`): its arguments and keys, and the jobs they compose."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.sweep.jobs import checked_jobs
from lightning_llm.tracking.sweep_definition import SweepSource
from lightning_llm.tracking.sweep_jobs import kind_of

ComposedJob = tuple[list[str], Config]


@dataclass(frozen=True)
class SearchRequest:
    """A requested search: the typed arguments, its keys, and whether machines are checked for training."""

    arguments: argparse.Namespace
    keys: SweepConfig
    to_train: bool = True

    def jobs_at(self, words: Sequence[str]) -> tuple[list[ComposedJob], str | None, SweepSource]:
        """Return the checked jobs, one per seed, of the arguments followed by `words`, as `checked_jobs` does."""
        overrides = [*self.arguments.overrides, *words]
        whole = argparse.Namespace(overrides=overrides, config=None, config_dir=self.arguments.config_dir)
        jobs, name, _ = checked_jobs(whole, to_train=self.to_train)
        named = [([*words, *(each for each in own if each not in words)], config) for own, config in jobs]
        return named, name, SweepSource(tuple(self.arguments.overrides), self.arguments.config_dir)


def check_launcher(config: Config) -> None:
    """Raise ConfigError if the launcher does not let a search watch its jobs."""
    if config.launcher.name != "local":
        text = f"is {config.launcher.name}, but a search must watch its jobs while they run. Use launcher=local."
        raise ConfigError(Problem("launcher", text))


def without_repeats(jobs: Sequence[ComposedJob]) -> list[ComposedJob]:
    """Return the jobs without duplicates: a search may draw equal values twice."""
    seen: dict[tuple[str, int], ComposedJob] = {}
    for job in jobs:
        seen.setdefault((kind_of(job[1]), job[1].seed), job)
    return list(seen.values())
