"""Teachers of a run (`distil`): which models they are, where they may stand, and what asking them costs. No torch."""

from collections.abc import Iterator

from pydantic import ValidationError

from lightning_llm.config.from_weights import KEY as INIT_KEY
from lightning_llm.config.from_weights import shape_of, weights_path
from lightning_llm.config.schema import Config, ModelConfig
from lightning_llm.errors import ConfigError, Problem, gathered
from lightning_llm.model.flops import count_parameters, flops_per_token
from lightning_llm.model.linear_names import has_bias
from lightning_llm.optim.state_bytes import DTYPE_BYTES
from lightning_llm.plan.degrees import Degrees

KEY = "distil.teachers"


def teacher_models(config: Config) -> list[ModelConfig]:
    """Return the teachers' shapes, as their folders say them.

    Raises:
        ConfigError: with what is wrong with each folder.
    """
    models, problems = [], list[Problem]()
    for path in config.distil.teachers if config.distil else ():
        with gathered(problems):
            try:
                shape = {"name": "teacher", **shape_of(weights_path(path))}
                models.append(ModelConfig.model_validate({**shape, "init_from": None}))
            except ValidationError as error:
                raise ConfigError(
                    Problem(KEY, f"{path} holds the config of no model: {error.errors()[0]['msg']}.")
                ) from error
    if problems:
        raise ConfigError([Problem(KEY if each.key == INIT_KEY else each.key, each.text) for each in problems])
    return models


def teacher_problems(config: Config, degrees: Degrees) -> Iterator[Problem]:
    """Yield why the run cannot learn from its teachers: layouts, vocabularies, lengths."""
    if config.distil is None:
        return
    for axis in ("tp", "cp", "pp"):
        if getattr(degrees, axis) > 1:
            text = (
                f"is {getattr(degrees, axis)}, and teachers (distil) are held and asked whole on each rank, while such "
                "ranks have parts of the vocabulary, of the sequences or of the layers. Set 1: data parallelism, with "
                "parallel.zero_stage up to 3."
            )
            yield Problem(f"parallel.{axis}", text)
    try:
        models = teacher_models(config)
    except ConfigError as error:
        yield from error.problems
        return
    for path, model in zip(config.distil.teachers, models, strict=True):
        yield from teacher_differences(path, model, config)


def teacher_differences(path: str, model: ModelConfig, config: Config) -> Iterator[Problem]:
    """Yield why the teacher `model` at `path` does not predict what the run learns."""
    if model.vocab_size != config.model.vocab_size:
        text = f"{path} predicts {model.vocab_size:,} tokens, and model.vocab_size is {config.model.vocab_size:,}."
        yield Problem(KEY, f"{text} Give teachers of one vocabulary, and set model.vocab_size to its size.")
    if model.max_sequence_length < config.data.sequence_length:
        text = (
            f"{path} takes {model.max_sequence_length:,} tokens: data.sequence_length={config.data.sequence_length:,}"
        )
        yield Problem(KEY, f"{text} is too long. Lower it.")


def teacher_bytes(config: Config) -> int:
    """Return the bytes of the teachers' weights: linears (and their biases) in the compute dtype, the rest in fp32."""
    total, width = 0, DTYPE_BYTES[config.precision.compute_dtype]
    for model in teacher_models(config):
        count = count_parameters(model, padded=True)
        cast = count.linear + count.head + (count.bias if has_bias(model) else 0)
        total += width * cast + 4 * (count.total - cast)
    return total


def teacher_flops_per_token(config: Config) -> int:
    """Return the FLOPs of asking all teachers about one token: their forward passes, a third of training each."""
    return sum(flops_per_token(model, config.data.sequence_length) // 3 for model in teacher_models(config))
