"""A search as `plan -m` shows it: its first jobs, the space or the rungs, and how far it has come."""

import argparse
import json
from typing import Any

from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.config.sweep_space import read_space
from lightning_llm.sweep.search.run import Asked
from lightning_llm.tracking.sweep_definition import Sweep
from lightning_llm.tracking.sweep_file import SEARCH, SEARCH_FILE


def search_facts(arguments: argparse.Namespace, keys: SweepConfig) -> tuple[Sweep, dict[str, Any]]:
    """Return the sweep of the jobs that are known before a search, and what it would do, as data and as lines.

    Raises:
        ConfigError: as starting it does, with all problems.
    """
    asked = Asked(arguments, keys, to_train=False)
    if keys.search == "halving":
        from lightning_llm.sweep.search.halving import planned_halving

        halving = planned_halving(asked)
        steps = ", ".join(map(str, halving.rungs))
        worse = f"those worse than the best by more than {keys.margin_nats:g}"
        words = f"halving of {len(halving.recipes)} recipes: {worse} end at "
        ended = [("ended before", each.words) for each in halving.dropped.values()]
        about = {**halving.whole.declared[SEARCH], "words": f"{words}steps {steps}", "rows": ended}
        return halving.whole, {**about, "ended": sorted(halving.ended)}
    from lightning_llm.sweep.search.optuna_search import planned_search

    search = planned_search(asked, read_space(arguments.overrides, arguments.config_dir))
    about = {key: value for key, value in search.first.declared[SEARCH].items() if key != "derived"}
    seeds = len(search.baseline)
    jobs = f"{seeds} job{'s' * (seeds > 1)} of the baseline, at most {keys.trials * seeds} of trials"
    words = f"optuna, {keys.trials} trials ({_done(search.first)} done), {keys.sampler}, {_pruning(keys)}: {jobs}"
    return search.first, {**about, "words": words, "rows": [(key, values) for key, values in about["space"].items()]}


def _pruning(keys: SweepConfig) -> str:
    if keys.pruning == "none":
        return "no pruning"
    here = "" if keys.startup_trials < keys.trials else ", so none here"
    return f"pruning by the {keys.pruning} after {keys.startup_trials} whole trials{here}"


def _done(whole: Sweep) -> int:
    """Return how many trials the search's own record has."""
    file = whole.folder / SEARCH_FILE
    return len(json.loads(file.read_text(encoding="utf-8"))["trials"]) if file.is_file() else 0
