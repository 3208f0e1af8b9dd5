"""A decoder with the weights of a run, a checkpoint or a Hugging Face folder, whole, as it is after training."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.config.compose import compose_config
from lightning_llm.config.overrides import override
from lightning_llm.config.weight_folders import TOKENIZER
from lightning_llm.data.tokens.tokenizer import Tokenizer
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.dtypes import DTYPES
from lightning_llm.model.weights.load import frozen_decoder
from lightning_llm.parallel.apply import InitialSlice
from lightning_llm.parallel.layout import Layout
from lightning_llm.probe.subject import Subject, device_of, find_subject, read_weights
from lightning_llm.train.parallel_model import ParallelModel
from lightning_llm.train.quantisation import Quantisation


def decoder_of(
    subject: Subject, weights: Mapping[str, Tensor], device: torch.device, compute_dtype: str = ""
) -> Decoder:
    """Return the model of `subject` on `device` with fp32 `weights` by name, in evaluation mode, without any cast.

    Activations are in `compute_dtype` (a key of `DTYPES`), by default that of the subject's recipe.
    """
    config = subject.config
    dtype = DTYPES[compute_dtype or config.precision.compute_dtype]
    return frozen_decoder(config.model, weights, dtype, device)


def sharded_decoder_of(
    subject: Subject, initial: InitialSlice, layout: Layout, device: torch.device, compute_dtype: str = ""
) -> ParallelModel:
    """Return this rank's part of what `decoder_of` returns, its weights in fp32 and cast on use. Collective."""
    config = subject.config
    dtype = compute_dtype or config.precision.compute_dtype
    precision = compose_config(["precision=fp32"]).precision.model_copy(update={"compute_dtype": dtype})
    quantisation = Quantisation(precision, config.seed, config.trainer.max_steps)
    plain = config.model_copy(update={"precision": precision})
    parallel = ParallelModel.of(plain, layout, device, quantisation, initial)
    parallel.model.eval()
    return parallel


def tokenizer_of(subject: Subject) -> Tokenizer:
    """Return the tokenizer that the weights of `subject` were trained with.

    Raises:
        ConfigError: there is no file of it, it cannot be read, or it has tokens that the model has no rows for.
    """
    settings = subject.config.data.tokenizer
    if settings.path is None:
        text = "is missing, which says what the tokens are. Bring it back from a copy; resume=auto writes it anew."
        raise ConfigError(Problem(str(Path(subject.folder, TOKENIZER)), text))
    try:
        tokenizer = Tokenizer(settings.path, settings.end_of_document)
    except (OSError, ValueError) as error:
        text = f"cannot be used: {error}. Name the token that ends a document: data.tokenizer.end_of_document, or of "
        text += "generate --end-of-document."
        raise ConfigError(Problem(settings.path, text)) from error
    rows = subject.config.model.vocab_size
    if tokenizer.vocab_size > rows:
        text = f"has {tokenizer.vocab_size} tokens, and the weights {rows} rows: it is not theirs. Bring theirs."
        raise ConfigError(Problem(settings.path, text))
    return tokenizer


def load_model(
    path: Path, compute_dtype: str | None, device: str, end_of_document: str | None = None
) -> tuple[Decoder, Tokenizer]:
    """Return the model and the tokenizer of what lies at `path`, see `decoder_of` and `end_words`.

    Raises:
        ConfigError: with all that is wrong with the words, or else with what lies there.
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


def end_words(end_of_document: str | None) -> list[str]:
    """Return the overrides that name the token that ends a document; None: what the weights say, or a usual name."""
    return [] if end_of_document is None else [override("data.tokenizer.end_of_document", end_of_document)]


def check_dtype(name: str | None) -> None:
    """Raise ConfigError unless `name` is a dtype that models compute in, or None."""
    if name is not None and name not in DTYPES:
        raise ConfigError(Problem("--compute-dtype", f"is '{name}', must be one of {', '.join(DTYPES)}."))
