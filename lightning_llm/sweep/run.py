"""`train -m`: run a sweep as a product of values, look by look until decided, or as a search."""

import argparse

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.config.sweep_space import read_space, read_sweep_keys
from lightning_llm.run.launch.relay import signals_passed_on
from lightning_llm.sweep.ending import close, close_again
from lightning_llm.sweep.jobs import checked_jobs, left_to_do, opened, start
from lightning_llm.tracking.sweep_definition import define


def sweep(arguments: argparse.Namespace) -> int:
    """Run the remaining jobs of a sweep in `run.root/experiment/<sweep>/<n>`.

    Finished and diverged runs are skipped, failed or stopped runs are resumed, and runs of other processes are left
    alone. Returns 0, 1 if a job failed, or 128 + a signal, which is passed on to the running jobs: they save and stop.
    A diverged job is a result, not a failure.
    """
    keys = read_sweep_keys(arguments.overrides, arguments.config_dir)
    if keys.search is not None:
        return _search(arguments, keys)
    composed = checked_jobs(arguments)
    if keys.until is not None:
        from lightning_llm.sweep.decide import run_until_decided

        return run_until_decided(composed, keys)
    whole = define(*composed)
    todo = left_to_do(whole.jobs)
    if not todo:
        print(f"sweep  nothing left to do, in {whole.folder}")
        close_again(whole)
        return 0
    keys_left = {job.key for job in todo}
    whole = opened(lambda: define(*composed))
    with signals_passed_on() as relay:
        outcomes = start([job for job in whole.jobs if job.key in keys_left], relay)  # now with their parent
    return close(whole, outcomes, relay.received)


def _search(arguments: argparse.Namespace, keys: SweepConfig) -> int:
    """Run a search instead of the product of values; return the exit code.

    Raises:
        ConfigError: with all problems, before anything starts.
    """
    if arguments.config:
        raise ConfigError(
            Problem("--config", "is one resolved run, but a search (-m) is composed. Use overrides instead.")
        )
    from lightning_llm.sweep.search.request import SearchRequest

    asked = SearchRequest(arguments, keys)
    if keys.search == "halving":
        from lightning_llm.sweep.search.halving import halve

        return halve(asked)
    from lightning_llm.sweep.search.optuna_search import search_values

    return search_values(asked, read_space(arguments.overrides, arguments.config_dir))
