"""A decoder with the weights of a run, a checkpoint or a Hugging Face folder, whole, as it is after training."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lightning_llm.data.tokenizer import Tokenizer
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.linear import Linear
from lightning_llm.parallel.apply import DTYPES
from lightning_llm.probe.subject import Subject, find_subject, read_weights


def decoder_of(
    subject: Subject, weights: Mapping[str, Tensor], device: torch.device, compute_dtype: str = ""
) -> Decoder:
    """Return the model of `subject` on `device` with fp32 `weights` by name, in evaluation mode, without any cast.

    Activations are in `compute_dtype` (a key of `DTYPES`), by default that of the subject's recipe.
    """
    config = subject.config
    dtype = DTYPES[compute_dtype or config.precision.compute_dtype]
    with torch.device("meta"):
        model = Decoder(config.model, dtype)
    model.load_state_dict({name: tensor.to(device) for name, tensor in weights.items()}, assign=True)
    for module in model.modules():
        if isinstance(module, Linear):
            module.to(dtype)  # once, and not in every forward pass
    return model.eval().requires_grad_(False)


def tokenizer_of(subject: Subject) -> Tokenizer:
    """Return the tokenizer that the weights of `subject` were trained with.

    Raises:
        ConfigError: there is no file of it, or it cannot be read.
    """
    settings = subject.config.data.tokenizer
    if settings.path is None:
        text = "is missing, which says what the tokens are. Bring it back from a copy; resume=auto writes it anew."
        raise ConfigError(Problem(str(Path(subject.folder, "tokenizer.json")), text))
    try:
        return Tokenizer(settings.path, settings.end_of_document)
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(settings.path, f"cannot be read: {error}.")) from error


def load_model(path: Path, compute_dtype: str | None, device: str) -> tuple[Decoder, Tokenizer]:
    """Return the model and the tokenizer of what lies at `path`, see `decoder_of`.

    Raises:
        ConfigError: with all that is wrong with the words, or else with what lies there.
    """
    problems: list[Problem] = []
    subject = where = None
    try:
        where = device_of(device)
    except ConfigError as error:
        problems += error.problems
    try:
        check_dtype(compute_dtype)
    except ConfigError as error:
        problems += error.problems
    try:
        subject = find_subject(path, [], None, needs_data=False)
    except ConfigError as error:
        problems += error.problems
    if problems or subject is None or where is None:
        raise ConfigError(problems)
    tokenizer = tokenizer_of(subject)
    return decoder_of(subject, read_weights(subject), where, compute_dtype or ""), tokenizer


def check_dtype(name: str | None) -> None:
    """Raise ConfigError unless `name` is a dtype that models compute in, or None."""
    if name is not None and name not in DTYPES:
        raise ConfigError(Problem("--compute-dtype", f"is '{name}', must be one of {', '.join(DTYPES)}."))


def device_of(wanted: str) -> torch.device:
    """Return the device that --device names. Raises ConfigError where it is not here."""
    if wanted == "cuda" and not torch.cuda.is_available():
        text = f"is 'cuda', and torch {torch.__version__} finds no CUDA device."
        raise ConfigError(Problem("--device", text))
    if wanted not in ("auto", "cpu", "cuda"):
        raise ConfigError(Problem("--device", f"is '{wanted}', must be auto, cpu or cuda."))
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(wanted)
