"""Several models judged as one: the mean of their weights, or of what they predict."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import get_swa_avg_fn

from lightning_llm.config.from_weights import NOT_OF_WEIGHTS
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.evaluate.weights import tokenizer_of
from lightning_llm.parallel.materialise import InitialSlice
from lightning_llm.probe.subject import Subject

Combine = Literal["probabilities", "logits"]
COMBINATIONS: tuple[Combine, ...] = ("probabilities", "logits")


class AverageWeights:
    """The fp32 mean of several models' weights by slices, as `torch.optim.swa_utils.AveragedModel` takes it.

    A running mean, so that of equal weights it is these, bit for bit.
    """

    def __init__(self, members: Sequence[InitialSlice]):
        self.members = members
        self._take_in = get_swa_avg_fn()

    def __call__(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` of parameter `name`, see `InitialSlice`."""
        first, *others = self.members
        mean = first(name, start, stop)
        for count, member in enumerate(others, start=1):
            mean = self._take_in(mean, member(name, start, stop), count)
        return mean


def check_members(subjects: Sequence[Subject], *, same_shape: bool) -> None:
    """Raise ConfigError unless all of `subjects` have one tokenizer, and with `same_shape` one model."""
    first, *others = subjects
    problems: list[Problem] = []
    shape = first.config.model.model_dump(exclude=set(NOT_OF_WEIGHTS))
    for subject in others:
        if tokenizer_of(subject).fingerprint != tokenizer_of(first).fingerprint:
            text = f"has another tokenizer than {first.folder}: its tokens mean something else."
            problems.append(Problem(str(subject.folder), text))
        own = subject.config.model.model_dump(exclude=set(NOT_OF_WEIGHTS))
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
