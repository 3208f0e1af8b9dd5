"""How much of a run's model its precision recipe quantizes. Imports no torch."""

from lightning_llm.config.schema import Config
from lightning_llm.model.structure import linear_names
from lightning_llm.precision.recipe.module_rules import Coverage, coverage


def coverage_of(config: Config) -> Coverage | None:
    """Return the linear layers and blocks that `config.precision` quantizes in `config.model`; None without casts."""
    return coverage(config.precision, linear_names(config.model), config.model.num_layers)
