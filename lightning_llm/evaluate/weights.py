"""Models to evaluate: from the weights of a run, a checkpoint or a Hugging Face folder; their tokenizer; averages."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.optim.swa_utils import get_swa_avg_fn

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.config.compose import compose_config
from lightning_llm.config.overrides import override
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.config.weight_folders import NOT_OF_WEIGHTS, TOKENIZER
from lightning_llm.data.tokens.tokenizer import Tokenizer
from lightning_llm.linalg import DTYPES
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.structure import why_not_generated
from lightning_llm.model.weights.load import frozen_decoder
from lightning_llm.parallel.apply import InitialSlice
from lightning_llm.parallel.layout import Layout
from lightning_llm.run.subject import Subject, device_of, find_subject, read_weights
from lightning_llm.train.parallel_model import ParallelModel
from lightning_llm.train.quantization import Quantization


def load_model(
    path: Path, compute_dtype: str | None, device: str, end_of_document: str | None = None
) -> tuple[Decoder, Tokenizer]:
    """Return the model and the tokenizer at `path`: a run, a checkpoint or a Hugging Face folder.

    Args:
        compute_dtype: dtype of activations, a key of `DTYPES`; None: that of the weights' recipe.
        device: "auto", "cpu" or "cuda".
        end_of_document: the token that ends a document; None: the weights' own.

    Raises:
        ConfigError: with all problems of the arguments, or else of the weights.
    """
    problems: list[Problem] = []
    subject = where = None
    with gathered(problems):
        where = device_of(device)
    with gathered(problems):
        check_dtype(compute_dtype)
    with gathered(problems):
        subject = find_subject(path, end_words(end_of_document), None, needs_data=False)
    if problems or subject is None or where is None:
        raise ConfigError(problems)
    tokenizer = tokenizer_of(subject)
    return decoder_of(subject, read_weights(subject), where, compute_dtype or ""), tokenizer


def tokenizer_of(subject: Subject) -> Tokenizer:
    """Return the tokenizer that the weights of `subject` were trained with.

    Raises:
        ConfigError: its file is missing or cannot be read, or it has more tokens than the model's embedding has rows.
    """
    settings = subject.config.data.tokenizer
    if settings.path is None:
        text = "is missing, so the tokens have no meaning. Restore it from a copy; resume=auto also writes it again."
        raise ConfigError(Problem(str(Path(subject.folder, TOKENIZER)), text))
    try:
        tokenizer = Tokenizer(settings.path, settings.end_of_document)
    except (OSError, ValueError) as error:
        text = f"cannot be used: {error}. Name the token that ends a document: data.tokenizer.end_of_document, or of "
        text += "generate --end-of-document."
        raise ConfigError(Problem(settings.path, text)) from error
    rows = subject.config.model.vocab_size
    if tokenizer.vocab_size > rows:
        text = f"has {tokenizer.vocab_size} tokens, but the weights have {rows} rows. Use the weights' own tokenizer."
        raise ConfigError(Problem(settings.path, text))
    return tokenizer


def check_results_are_own(model: ModelConfig) -> None:
    """Raise ConfigError if a token's result depends on other tokens of its batch, as for experts with a capacity."""
    if (why := why_not_generated(model)) is not None:
        text = f"{why}. Set capacity_factor to null in a copy of the weights' config, so that no token is dropped."
        raise ConfigError(Problem("model.blocks", text))


def decoder_of(
    subject: Subject, weights: Mapping[str, Tensor], device: torch.device, compute_dtype: str = ""
) -> Decoder:
    """Return the model of `subject` on `device`, unquantized and in evaluation mode.

    `weights`: {parameter: fp32 tensor}. `compute_dtype`: dtype of activations, a key of `DTYPES`; "" for that of the
    subject's recipe.
    """
    config = subject.config
    check_results_are_own(config.model)
    dtype = DTYPES[compute_dtype or config.precision.compute_dtype]
    return frozen_decoder(config.model, weights, dtype, device)


def sharded_decoder_of(
    subject: Subject, initial: InitialSlice, layout: Layout, device: torch.device, compute_dtype: str = ""
) -> ParallelModel:
    """Return this rank's part of the model that `decoder_of` builds. Weights are fp32 and cast on use. Collective.

    `initial`: returns slices of the weights; `layout`: how ranks share the model.
    """
    config = subject.config
    check_results_are_own(config.model)
    dtype = compute_dtype or config.precision.compute_dtype
    precision = compose_config(["precision=fp32"]).precision.model_copy(update={"compute_dtype": dtype})
    quantization = Quantization(precision, config.seed, config.trainer.max_steps)
    plain = config.model_copy(update={"precision": precision})
    parallel = ParallelModel.build(plain, layout, device, quantization, initial)
    parallel.model.eval()
    return parallel


class AverageWeights:
    """The fp32 mean of the weights of several models, computed slice by slice.

    It is a running mean, as in `torch.optim.swa_utils.AveragedModel`, so the mean of equal weights has their bits.
    """

    def __init__(self, members: Sequence[InitialSlice]):
        self.members = members
        self._take_in = get_swa_avg_fn()

    def __call__(self, name: str, start: int, stop: int) -> Tensor:
        """Return the mean of the elements `start` to `stop` of the parameter `name`, fp32 (see `InitialSlice`)."""
        first, *others = self.members
        mean = first(name, start, stop)
        for count, member in enumerate(others, start=1):
            mean = self._take_in(mean, member(name, start, stop), count)
        return mean


def check_members(subjects: Sequence[Subject], *, same_shape: bool) -> None:
    """Raise ConfigError unless all `subjects` have the same tokenizer and, with `same_shape`, the same model shape."""
    first, *others = subjects
    problems: list[Problem] = []
    shape = first.config.model.model_dump(exclude=set(NOT_OF_WEIGHTS))
    for subject in others:
        if tokenizer_of(subject).fingerprint != tokenizer_of(first).fingerprint:
            text = f"has another tokenizer than {first.folder}. Combine models of one tokenizer."
            problems.append(Problem(str(subject.folder), text))
        own = subject.config.model.model_dump(exclude=set(NOT_OF_WEIGHTS))
        if same_shape and (differing := [key for key in shape if own[key] != shape[key]]):
            keys = ", ".join(f"model.{key} ({own[key]} and {shape[key]})" for key in differing)
            text = f"has another shape than {first.folder}: {keys}. Only models of one shape can be averaged."
            problems.append(Problem(str(subject.folder), text))
        if not same_shape and subject.config.model.vocab_size != first.config.model.vocab_size:
            sizes = f"{subject.config.model.vocab_size} and {first.config.model.vocab_size}"
            text = f"has another model.vocab_size than {first.folder}: {sizes}. Combine models of one vocabulary."
            problems.append(Problem(str(subject.folder), text))
    if problems:
        raise ConfigError(problems)


def end_words(end_of_document: str | None) -> list[str]:
    """Return the override for the token that ends a document, as a list; [] for None, the weights' own token."""
    return [] if end_of_document is None else [override("data.tokenizer.end_of_document", end_of_document)]


def check_dtype(name: str | None) -> None:
    """Raise ConfigError unless `name` is None or a dtype in which models can compute (a key of `DTYPES`)."""
    if name is not None and name not in DTYPES:
        raise ConfigError(Problem("--compute-dtype", f"must be one of {', '.join(DTYPES)}.", name))
