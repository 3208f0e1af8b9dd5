"""Attention whose scores are capped before the softmax: Gemma 2's. Letters as in `mixer.attention`."""

import math
from functools import cache

import torch
from torch import Tensor

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.mixer.attention import Attention, Kernel, for_all_heads
from lightning_llm.model.mixer.soft_capped_attention_spec import SoftCappedAttention as Spec


class SoftCappedAttention(Attention):
    """`Attention` with `cap x tanh(scores / cap)`, and a scale of the scores of its own."""

    def __init__(self, spec: Spec, config: ModelConfig):
        super().__init__(spec, config)
        self.kernel = self.attend = self.block_kernel = capped_attention(spec.cap)
        scalar = spec.query_pre_attention_scalar or self.head_dim
        self.scale = math.sqrt(self.head_dim / scalar)  # of what the kernel divides by sqrt(K)

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q if self.scale == 1.0 else q * self.scale, k  # [B, T, H, K], [B, T, G, K]


@cache
def capped_attention(cap: float) -> Kernel:
    """Return the function of q `[B, T, H, K]`, k, v `[B, S, G, K]` and mask that gives `[B, T, H, K]`: one for a cap.

    The mask is as in `torch_attention`. Capped scores and softmax are in fp32.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        keys = for_all_heads(k, q.shape[2]).permute(0, 2, 3, 1)  # [B, H, K, S]
        values = for_all_heads(v, q.shape[2]).transpose(1, 2)  # [B, H, S, K]
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.matmul(q.transpose(1, 2) / math.sqrt(q.shape[-1]), keys).to(wide)  # [B, H, T, S]
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()  # [T, S]
        seen = (torch.tanh(scores / cap) * cap).masked_fill(~mask, -math.inf)  # [B, H, T, S]
        mixed = torch.matmul(torch.softmax(seen, dim=-1).to(v.dtype), values)  # [B, H, T, K]
        return mixed.transpose(1, 2)  # [B, T, H, K]

    return attend
