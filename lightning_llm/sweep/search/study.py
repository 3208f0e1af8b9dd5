"""Optuna's study in a sweep's folder, and its samplers: the same after any stop."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.sqlite_address import sqlite_address
from lightning_llm.config.schema.sweep import SweepConfig

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

STORAGE = "search.db"
STUDY = "search"


def open_study(folder: Path) -> "Study":
    """Return the study in `folder`, made where there is none.

    Raises:
        ConfigError: its file is damaged.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    file = folder / STORAGE
    try:
        study = optuna.create_study(
            storage=sqlite_address(file), study_name=STUDY, direction="minimize", load_if_exists=True
        )
    except Exception as error:  # SQLAlchemy's and Optuna's own, of a file that is damaged
        text = f"cannot be opened ({type(error).__name__}). Move it away: the search begins anew, beside the runs made."
        raise ConfigError(Problem(str(file), text)) from error
    return study


def sampler_after(keys: SweepConfig, trials: int) -> "BaseSampler":
    """Return the sampler, its random numbers those of this many trials before: the same after any stop."""
    from optuna.samplers import GPSampler, RandomSampler, TPESampler

    seed = (keys.search_seed + trials) % 2**32
    if keys.sampler == "random":
        return RandomSampler(seed=seed)
    return GPSampler(seed=seed) if keys.sampler == "gp" else TPESampler(seed=seed, constant_liar=True)


def add_trial(study: "Study", keys: SweepConfig, distributions: Mapping[str, Any]) -> "FrozenTrial":
    """Return a new trial under way, its values drawn by the sampler.

    `study.ask` writes the trial, and then a value at a time. A process that is killed between them would leave a trial
    without values; here it is written at once, and drawn anew if it was not.
    """
    import optuna
    from optuna.trial import TrialState, create_trial

    drawn = optuna.create_study(direction="minimize", sampler=sampler_after(keys, len(study.trials)))
    drawn.add_trials(study.trials)
    params = drawn.ask(dict(distributions)).params
    study.add_trial(create_trial(state=TrialState.RUNNING, params=params, distributions=dict(distributions)))
    return study.trials[-1]
