"""Teachers of a run (`distil`): their models, the layouts that allow them, their bytes and FLOPs. No torch."""

from collections.abc import Iterator

from pydantic import ValidationError

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema import Config, ModelConfig
from lightning_llm.config.weight_folders import INIT_FROM, shape_of, weights_path
from lightning_llm.model.flops import count_parameters, flops_per_token
from lightning_llm.model.structure import has_bias
from lightning_llm.optim.kinds import DTYPE_BYTES
from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.degrees import Degrees

KEY = "distil.teachers"


def teacher_models(config: Config) -> list[ModelConfig]:
    """Return the teachers' model configs, read from their folders. Raises ConfigError if a folder cannot be read."""
    return [_model_at(path) for path in config.distil.teachers] if config.distil else []


def _model_at(path: str) -> ModelConfig:
    """Return the model config of the weights at `path`.

    Raises:
        ConfigError: the folder has no readable model config.
    """
    try:
        return ModelConfig.model_validate({"name": "teacher", **shape_of(weights_path(path)), "init_from": None})
    except ValidationError as error:
        text = f"{path} has no valid model config: {error.errors()[0]['msg']}."
        raise ConfigError(Problem(KEY, text)) from error
    except ConfigError as error:
        problems = [Problem(KEY, each.text, each.value) if each.key == INIT_FROM else each for each in error.problems]
        raise ConfigError(problems) from error


def teacher_problems(config: Config, degrees: Degrees) -> Iterator[Problem]:
    """Yield why the run cannot use its teachers: layout, vocabulary, sequence length."""
    if config.distil is None:
        return
    if config.model.output_z_loss is not None:
        text = "with distil: the gradient of the divergence has no z-loss. Set it to null."
        yield Problem("model.output_z_loss", text, config.model.output_z_loss)
    for axis in reversed(AXES.cutting("layers", "sequence", "width")):
        if degrees.ranks(axis) > 1:
            text = (
                f"is {degrees.ranks(axis)}, and each rank runs whole teachers (distil), but these "
                "ranks split the vocabulary, sequences or layers. Set 1, and use data parallelism with "
                "parallel.zero_stage up to 3."
            )
            yield Problem(f"parallel.{axis}", text)
    for path in config.distil.teachers:
        try:
            yield from teacher_differences(path, _model_at(path), config)
        except ConfigError as error:
            yield from error.problems


def teacher_differences(path: str, model: ModelConfig, config: Config) -> Iterator[Problem]:
    """Yield why the teacher `model` at `path` does not match the run's vocabulary or sequence length."""
    if model.vocab_size != config.model.vocab_size:
        text = f"{path} predicts {model.vocab_size:,} tokens, and model.vocab_size is {config.model.vocab_size:,}."
        yield Problem(KEY, f"{text} Use teachers with one vocabulary, and set model.vocab_size to its size.")
    if model.max_sequence_length < config.data.sequence_length:
        text = (
            f"{path} takes {model.max_sequence_length:,} tokens; data.sequence_length={config.data.sequence_length:,}"
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
    """Return the FLOPs of all teachers' forward passes for one token, each a third of its FLOPs in training."""
    return sum(flops_per_token(model, config.data.sequence_length) // 3 for model in teacher_models(config))
