"""Attention whose queries and keys are normed within each head, before positions turn them: Qwen3's."""

from torch import Tensor

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.block_spec import norm_of
from lightning_llm.model.mixer.attention import Attention
from lightning_llm.model.mixer.attention_spec import AttentionSpec


class QKNormAttention(Attention):
    """`Attention` with `q_norm` and `k_norm` over K elements, shared by all heads. Letters as there."""

    def __init__(self, spec: AttentionSpec, config: ModelConfig):
        super().__init__(spec, config)
        self.q_norm = norm_of(config).build_for(config, self.head_dim)
        self.k_norm = norm_of(config).build_for(config, self.head_dim)

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(q), self.k_norm(k)  # [B, T, H, K], [B, T, G, K]
