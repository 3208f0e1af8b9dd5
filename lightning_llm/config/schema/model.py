"""`model`: the shape of one decoder-only transformer."""

from typing import Literal

from pydantic import Field

from lightning_llm.config.schema.base import Group, PositiveFloat, PositiveInt


class RopeScaling(Group):
    """Llama 3.1's frequency scaling (Meta's `apply_scaling`; "llama3" in transformers)."""

    factor: PositiveFloat
    low_frequency_factor: PositiveFloat
    high_frequency_factor: PositiveFloat
    original_sequence_length: PositiveInt


class ModelConfig(Group):
    """A decoder: every size of Llama and GPT-3 is a point in this space, as YAML in `conf/model/`."""

    name: str
    vocab_size: PositiveInt = Field(description="true vocabulary; the token ids of the data lie below it")
    vocab_multiple: PositiveInt = Field(
        128, description="embedding rows are padded to a multiple of this, in every layout"
    )
    num_layers: int = Field(gt=0, le=2**14)
    hidden_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt | None = Field(None, description="null: hidden_size / num_heads")
    ffn_hidden_size: PositiveInt
    max_sequence_length: PositiveInt
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: PositiveFloat = 1e-5
    position: Literal["rope", "learned"] = "rope"
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: RopeScaling | None = None
    activation: Literal["swiglu", "gelu"] = "swiglu"
    gelu: Literal["tanh", "exact"] = "tanh"
    bias: bool = False
    tie_embeddings: bool = False
    init: Literal["llama", "gpt2"] = Field("llama", description="named initialisation, see lightning_llm/model/init.py")
    init_std: PositiveFloat = 0.02
    parameters_published: int | None = Field(None, gt=0, description="the published parameter count, asserted in tests")

    @property
    def attention_head_dim(self) -> int:
        """Elements per attention head: `head_dim`, or `hidden_size / num_heads`."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and of the head: `vocab_size` rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
