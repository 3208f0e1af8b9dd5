"""Sampling of tokens from a model: with a cache if it is a decoder, otherwise by a full forward pass per token."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.structure import why_not_generated

PROMPT_TOKENS = 256
"""Number of prompt tokens per forward pass, which computes the logits of all although only the last are used."""

NextLogits = Callable[[Tensor], Tensor]
"""Function of the tokens `[B, n]` that follow those of earlier calls; returns logits `[B, V]` of the next token."""


class Model(Protocol):
    """Model from tokens `[B, T]` to logits `[B, T or 1, V]`: a decoder, or `LanguageModule.whole_model`."""

    config: ModelConfig

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the logits of the last position, or of all positions."""


@dataclass(frozen=True)
class Sampler:
    """Sampling of the next token from the softmax of `logits / temperature`; `temperature=0` takes the likeliest.

    `top_k` limits it to the likeliest k tokens; `top_p` to the smallest set of these with a total probability of at
    least `top_p` (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751). Raises ValueError for invalid settings.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf") or (self.top_k is not None and self.top_k < 1):
            raise ValueError(
                f"temperature={self.temperature} must be at least 0 and top_k={self.top_k} at least 1 or null"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")

    def __call__(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return one sampled token per sequence, int64 `[B, 1]`, for `logits` `[B, V]`; `generator`: on their
        device."""
        if self.temperature == 0:
            return logits.argmax(dim=-1, keepdim=True)  # [B, 1]
        kept, ids = logits.topk(min(self.top_k or logits.shape[-1], logits.shape[-1]), dim=-1)  # 2 x [B, k], descending
        probabilities = torch.softmax(kept / self.temperature, dim=-1)  # [B, k]
        if self.top_p < 1:
            before = probabilities.cumsum(-1) - probabilities  # [B, k] of those that are likelier
            probabilities = probabilities.masked_fill(before >= self.top_p, 0.0)
        drawn = torch.multinomial(probabilities, 1, generator=generator)  # [B, 1]
        return ids.gather(-1, drawn)  # [B, 1]


class CachedLogits:
    """`NextLogits` of a decoder that caches keys and values of up to `length` tokens."""

    def __init__(self, model: Decoder, batch_size: int, length: int):
        """Raises ValueError as `Decoder.new_cache` does."""
        self.model = model
        self.cache = model.new_cache(batch_size, length)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, V]` after `tokens` `[B, n]`, n > 0."""
        for part in tokens.split(PROMPT_TOKENS, dim=1):
            logits = self.model.step(part, self.cache)[:, -1]  # [B, V]
        return logits


class RecomputedLogits:
    """`NextLogits` of any model: a full forward pass over the last `max_sequence_length` tokens for each new token."""

    def __init__(self, model: Model):
        self.model = model
        self.seen: Tensor | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, V]` after `tokens` `[B, n]`."""
        self.seen = tokens if self.seen is None else torch.cat([self.seen, tokens], dim=1)  # [B, T]
        self.seen = self.seen[:, -self.model.config.max_sequence_length :]
        return self.model(self.seen)[:, -1]  # [B, V]


@torch.no_grad()
def sampled(
    next_logits: NextLogits,
    prompt_tokens: Tensor,
    vocab_size: int,
    sampler: Sampler,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield sampled tokens, int64 `[B, 1]`, one after another without end, after `prompt_tokens` `[B, T]`.

    `vocab_size`: number of real token ids; logits beyond are ignored. The model computes a token's successor only when
    the next token is requested.
    """
    tokens = prompt_tokens
    while True:
        logits = next_logits(tokens)[:, :vocab_size].float()  # [B, vocab_size]
        tokens = sampler(logits, generator)  # [B, 1]
        yield tokens


def generate(
    model: Model,
    prompt_tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return `prompt_tokens` `[B, T]` with `max_new_tokens` sampled tokens appended: int64 `[B, T + max_new_tokens]`.

    The model sees the last `max_sequence_length` tokens. If all tokens fit, a decoder caches them; any other model
    computes its window again for each token. `generator`: on the model's device. The module's training mode is
    restored.

    Raises:
        ValueError: the prompt is empty, the model cannot generate, or a setting is invalid (`Sampler`).
    """
    if prompt_tokens.shape[1] == 0:
        raise ValueError("the prompt is empty: give at least one token, such as the end-of-text token")
    if (why := why_not_generated(model.config)) is not None:
        raise ValueError(why)
    sampler = Sampler(temperature, top_k)
    batch_size, length = prompt_tokens.shape[0], prompt_tokens.shape[1] + max_new_tokens
    logits: NextLogits = RecomputedLogits(model)
    if isinstance(model, Decoder) and length <= model.config.max_sequence_length:
        logits = CachedLogits(model, batch_size, length)
    module = model if isinstance(model, nn.Module) else nn.Module()
    was_training, tokens = module.training, [prompt_tokens]
    module.eval()
    try:
        drawn = sampled(logits, prompt_tokens, model.config.vocab_size, sampler, generator)
        tokens += [next(drawn) for _ in range(max_new_tokens)]
    finally:
        module.train(was_training)
    return torch.cat(tokens, dim=1)
