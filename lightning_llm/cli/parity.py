"""Comparison of logits with transformers, for imported and exported weights."""

import importlib.util
import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.flops import count_parameters
from lightning_llm.model.weights.folder import Weights
from lightning_llm.model.weights.load import state_dict_of, whole_decoder

TOKENS = 64
LARGEST_DIFFERENCE = 1e-3
"""Tolerance in fp32, relative to the largest logit. Rounding differences are below 1e-5."""


class AnotherModelError(Exception):
    """The converted model and transformers compute different logits: nothing is written. Exit code 1."""

    def report(self) -> int:
        """Print the error; return the exit code."""
        text = f"error: logits {self}: the converted model is not equivalent. Nothing was written."
        print(text, file=sys.stderr)
        return 1


class Parity(NamedTuple):
    """Largest difference of a logit from transformers, and transformers' largest logit, in fp32 over `tokens`."""

    difference: float
    largest_logit: float
    tokens: int

    @property
    def holds(self) -> bool:
        """Return whether both models are equivalent."""
        return self.difference <= LARGEST_DIFFERENCE * self.largest_logit

    @property
    def line(self) -> str:
        """The result of the comparison in one line."""
        return (
            f"differ from transformers' by at most {self.difference:.1e} (the largest logit is "
            f"{self.largest_logit:.3g}; fp32, {self.tokens} random tokens)"
        )


def parity_problems(config: ModelConfig, codes: bool = False) -> list[Problem]:
    """Return problems that prevent the comparison: a library is missing, or the model is too large for memory.

    `codes`: the folder has codes, which transformers reads by compressed-tensors.
    """
    if importlib.util.find_spec("transformers") is None:
        text = "is not installed, and the weights are compared with it. pip install transformers, or use --no-parity."
        return [Problem("transformers", text)]
    if codes and importlib.util.find_spec("compressed_tensors") is None:
        text = (
            "is not installed, by which transformers reads codes. pip install compressed-tensors, or use --no-parity."
        )
        return [Problem("compressed-tensors", text)]
    needed, free = 2 * 4 * count_parameters(config, padded=True).total, psutil.virtual_memory().available
    if needed <= free:
        return []
    text = (
        f"needs two copies of the model in fp32, {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB of memory are "
        "free. Skip it with --no-parity."
    )
    return [Problem("comparison with transformers", text)]


@torch.no_grad()
def parity_of(folder: Path, weights: Weights, codes: bool = False) -> Parity:
    """Compare the fp32 logits of our decoder with `weights` and of transformers' model in `folder`.

    `codes`: the folder has codes, which transformers reads as bf16 numbers. All weights are rounded to bf16 then.

    Raises:
        ConfigError: transformers cannot load the folder or compute the logits.
    """
    config = weights.config
    length = min(TOKENS, config.max_sequence_length)
    tokens = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))  # [1, T]
    theirs = _theirs(folder, tokens, codes)  # [1, T, V]
    ours = _ours(weights, tokens, codes)  # [1, T, V]
    return Parity(float((ours - theirs).abs().max()), float(theirs.abs().max()), length)


def _ours(weights: Weights, tokens: Tensor, codes: bool) -> Tensor:
    state = {name: each.bfloat16() if codes else each for name, each in state_dict_of(weights).items()}
    logits: Tensor = whole_decoder(weights.config, state)(tokens)[..., : weights.config.vocab_size]
    return logits


def _theirs(folder: Path, tokens: Tensor, codes: bool) -> Tensor:
    quiet: Any = redirect_stderr(io.StringIO()) if codes else nullcontext()  # compressed-tensors draws bars
    with quiet, _transformers_may_fail("cannot load the model", "Skip the comparison with --no-parity."):
        from transformers import AutoModelForCausalLM, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.bfloat16 if codes else torch.float32,
            attn_implementation="eager",  # others do not support capped attention scores
            local_files_only=True,
            trust_remote_code=False,
        )
        if codes:
            model.eval()(tokens)  # the first pass replaces codes by numbers, in bf16
            nn.Module.float(model)
        logits: Tensor = model.eval()(tokens).logits
    return logits


def check_accepted(entries: Mapping[str, Any]) -> None:
    """Raise ConfigError if transformers is installed and rejects a config.json with these `entries`."""
    if importlib.util.find_spec("transformers") is None:
        return
    with _transformers_may_fail("rejects the config.json of this model", "Its checkpoints are kept."):
        from transformers import AutoConfig

        AutoConfig.for_model(**entries)


@contextmanager
def _transformers_may_fail(what: str, remedy: str) -> Iterator[None]:
    """Turn any exception of transformers into a one-line ConfigError; exception classes differ between versions."""
    try:
        yield
    except Exception as error:
        name = f"transformers {metadata.version('transformers')}"
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # Validators of transformers name the field in the first line and the reason in the last.
        why = ": ".join([type(error).__name__, *dict.fromkeys([*lines[:1], *lines[-1:]])]).rstrip(".")
        raise ConfigError(Problem(name, f"{what}: {why}. {remedy}")) from error
