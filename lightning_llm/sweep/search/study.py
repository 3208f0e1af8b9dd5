"""Optuna's study in a sweep's folder, and its samplers: the same after any stop."""

from pathlib import Path
from typing import TYPE_CHECKING

from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.errors import ConfigError, Problem

if TYPE_CHECKING:
    from optuna import Study
    from optuna.samplers import BaseSampler

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
            storage=f"sqlite:///{file}", study_name=STUDY, direction="minimize", load_if_exists=True
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
