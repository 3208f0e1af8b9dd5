"""The layout that the ranks of an evaluation take: its words, checked against the model."""

import re
from collections.abc import Sequence

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.plan.degrees import Degrees, layout_problems, resolve_degrees
from lightning_llm.plan.divisibility import sharding_problems
from lightning_llm.plan.nodes import with_reduction
from lightning_llm.plan.stages import pipeline_problems
from lightning_llm.run.launch.environment import adopt_world

LAYOUT_WORD = re.compile(r"(parallel(\.\w+)?|trainer\.devices|world)=.*", re.DOTALL)
"""An override that says how an evaluation is spread, and no path."""


def composed_layout(words: Sequence[str], accelerator: str) -> Config:
    """Return a config with the `parallel`, `trainer.devices` and `world` of `words`, or of the ranks started for it.

    Raises:
        ConfigError: with what is wrong with the words alone.
    """
    problems = [
        Problem(word, "is no override here: parallel=NAME, parallel.KEY=VALUE and trainer.devices=N; data: --data.")
        for word in words
        if not LAYOUT_WORD.fullmatch(word)
    ]
    if problems:
        raise ConfigError(problems)
    made = adopt_world(compose_config([*words, f"trainer.accelerator={accelerator}"]))
    if made.parallel.compile:
        raise ConfigError(Problem("parallel.compile", "is true, and evaluations are not compiled. Leave it out."))
    return made


def spread(config: Config, made: Config) -> tuple[Config, Degrees]:
    """Return `config` under the layout of `made`, and that one's degrees.

    Nothing is trained: several ranks have the global batch of which each of a pipeline's stages has a micro-batch.

    Raises:
        ConfigError: with all by which model and layout do not go together.
    """
    degrees = resolve_degrees(made.parallel, made.world or made.trainer.devices)
    data, trainer = config.data, made.trainer
    if degrees.world > 1:
        data = data.model_copy(update={"global_batch_size": data.micro_batch_size * degrees.dp * degrees.pp})
    spread_over = {"devices": trainer.devices, "accelerator": trainer.accelerator}
    changed = {
        "parallel": made.parallel,
        "trainer": config.trainer.model_copy(update=spread_over),
        "world": made.world,
        "data": data,
        "optim": made.optim,
    }
    whole = config.model_copy(update=changed)
    problems = [
        *layout_problems(whole.parallel, degrees),
        *sharding_problems(whole, degrees),
        *pipeline_problems(whole, degrees),
    ]
    if problems:
        raise ConfigError(problems)
    return with_reduction(whole, degrees), degrees


def task_problems(config: Config, degrees: Degrees) -> list[Problem]:
    """Return why ranks cannot share the tokens of a task's longest texts."""
    length = config.model.max_sequence_length
    shares = (2 * degrees.cp if degrees.cp > 1 else 1) * (degrees.tp if config.parallel.sequence_parallel else 1)
    if length % shares == 0:
        return []
    text = f"is {length}, no multiple of the {shares} parts that ranks share a text in. Take other parallel.cp or tp."
    return [Problem("model.max_sequence_length", text)]
