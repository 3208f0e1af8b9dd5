"""Several models judged as one: the mean of their weights, or of what they predict."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import get_swa_avg_fn

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.evaluate.weights import tokenizer_of
from lightning_llm.probe.subject import Subject, read_weights

Combine = Literal["probabilities", "logits"]
COMBINATIONS: tuple[Combine, ...] = ("probabilities", "logits")


def average_weights(subjects: Sequence[Subject]) -> dict[str, Tensor]:
    """Return the fp32 mean of the subjects' weights, by name, as `torch.optim.swa_utils.AveragedModel` takes it.

    A running mean, so that of equal weights it is these, bit for bit. Two models' weights are held at once.
    """
    take_in = get_swa_avg_fn()
    mean = read_weights(subjects[0])
    for count, subject in enumerate(subjects[1:], start=1):
        weights = read_weights(subject)
        for name in mean:
            mean[name] = take_in(mean[name], weights[name], count)
    return mean


NOT_SHAPE = {"name", "init_from", "init", "init_std", "parameters_published"}
"""Keys of `model` that say where the weights began, not what they are the weights of."""


def check_members(subjects: Sequence[Subject], *, same_shape: bool) -> None:
    """Raise ConfigError unless all of `subjects` have one tokenizer, and with `same_shape` one model."""
    first, *others = subjects
    problems: list[Problem] = []
    shape = first.config.model.model_dump(exclude=NOT_SHAPE)
    for subject in others:
        if tokenizer_of(subject).fingerprint != tokenizer_of(first).fingerprint:
            text = f"has another tokenizer than {first.folder}: its tokens mean something else."
            problems.append(Problem(str(subject.folder), text))
        own = subject.config.model.model_dump(exclude=NOT_SHAPE)
        if same_shape and (differing := [key for key in shape if own[key] != shape[key]]):
            keys = ", ".join(f"model.{key} ({own[key]} and {shape[key]})" for key in differing)
            text = f"is no model of the shape of {first.folder}: {keys}. Weights of one shape alone have a mean."
            problems.append(Problem(str(subject.folder), text))
        if not same_shape and subject.config.model.vocab_size != first.config.model.vocab_size:
            sizes = f"{subject.config.model.vocab_size} and {first.config.model.vocab_size}"
            problems.append(Problem(str(subject.folder), f"predicts another vocabulary than {first.folder}: {sizes}."))
    if problems:
        raise ConfigError(problems)


class Ensemble(nn.Module):
    """Gives logits whose softmax is the mean of the members' probabilities, or that are the mean of their logits.

    The second is the geometric mean of probabilities, normalised. Of one member `of` makes itself.
    """

    def __init__(self, members: Sequence[nn.Module], combine: Combine):
        super().__init__()
        self.members = nn.ModuleList(members)
        self.combine = combine
        shapes: list[Any] = [member.config for member in members]
        self.config: ModelConfig = min(shapes, key=lambda shape: shape.max_sequence_length)
        self.vocab_size = self.config.vocab_size

    @classmethod
    def of(cls, members: Sequence[nn.Module], combine: Combine) -> nn.Module:
        """Return the ensemble, of one member itself."""
        return members[0] if len(members) == 1 else cls(members, combine)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        """Return logits `[B, T, V]` of real ids, fp32; see `Decoder.forward`."""
        total = None
        for count, member in enumerate(self.members):
            logits = member(tokens, positions, document_ids)[..., : self.vocab_size].float()  # [B, T, vocab_size]
            if self.combine == "logits":
                total = logits if total is None else total + (logits - total) / (count + 1)
            else:
                log_p = F.log_softmax(logits, dim=-1)  # [B, T, vocab_size]
                total = log_p if total is None else torch.logaddexp(total, log_p)
        if total is None:
            raise ValueError("an ensemble of no member predicts nothing")
        return total if self.combine == "logits" else total - math.log(len(self.members))
