"""What a run will take from its sources, as far as the config alone tells: no document read."""

from typing import Any

from lightning_llm.config.schema.data import DataConfig
from lightning_llm.data.mixing.addressing import Mixture


def planned_phases(config: DataConfig, max_steps: int) -> list[dict[str, Any]]:
    """Return for each phase of a given `data.mixing` its steps and the tokens that it draws by source, as JSON data.

    The phase is the steps after `first_step`, up to `last_step`. Nothing where the weights stay,
    or no weight tells.
    """
    if config.mixture is None or config.mixture.shares_by_tokens:
        return []
    mixture: Mixture = config.mixture.build(config.trained_weights, config.global_batch_size, max_steps)
    width, length = config.global_batch_size, config.sequence_length
    return [
        {
            "name": phase.name,
            "first_step": phase.first // width,
            "last_step": phase.last // width,
            "drawn_tokens": {name: n * length for name, n in zip(mixture.names, phase.drawn, strict=True)},
        }
        for phase in mixture.phases(max_steps * width)
    ]
