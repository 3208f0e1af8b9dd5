"""Sampling text from a decoder, plainly: one forward over the window for each new token, no cache of keys."""

import torch
from torch import Tensor

from lightning_llm.model.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    prompt_tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return `prompt_tokens` `[B, T]` with `max_new_tokens` sampled tokens appended: int64 `[B, T + max_new_tokens]`.

    Each token is drawn from the softmax of `logits / temperature`, among the `top_k` likeliest where given;
    `temperature=0` takes the likeliest. The model sees the last `max_sequence_length` tokens. `generator` lives on the
    model's device. The model's training mode is put back. Raises ValueError for an empty prompt, a negative
    temperature or `top_k` below 1.
    """
    if prompt_tokens.shape[1] == 0:
        raise ValueError("the prompt is empty: give at least one token, such as the end-of-text token")
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"temperature={temperature} must be at least 0 and top_k={top_k} at least 1 or null")
    was_training, tokens = model.training, prompt_tokens
    model.eval()
    try:
        for _ in range(max_new_tokens):
            window = tokens[:, -model.config.max_sequence_length :]  # [B, <= max_sequence_length]
            logits = model(window)[:, -1, : model.config.vocab_size].float()  # [B, vocab_size]
            tokens = torch.cat([tokens, _sample(logits, temperature, top_k, generator)], dim=1)  # [B, T + 1]
    finally:
        model.train(was_training)
    return tokens


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)  # [B, 1]
    kept, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]), dim=-1)  # 2 x [B, top_k]
    drawn = torch.multinomial(torch.softmax(kept / temperature, dim=-1), 1, generator=generator)  # [B, 1]
    return ids.gather(-1, drawn)  # [B, 1]
