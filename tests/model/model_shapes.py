"""Small configs that the tests of the model share."""

import torch

from lightning_llm.config.schema.model import ModelConfig, RopeScaling
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import initialise


def llama(**changes) -> ModelConfig:
    shape = {
        "name": "test",
        "vocab_size": 100,
        "vocab_multiple": 16,
        "num_layers": 3,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 96,
        "max_sequence_length": 160,
    }
    return ModelConfig(**(shape | changes))


def gpt2(**changes) -> ModelConfig:
    switches = {
        "num_kv_heads": 4,
        "norm": "layernorm",
        "position": "learned",
        "activation": "gelu",
        "bias": True,
        "tie_embeddings": True,
        "init": "gpt2",
    }
    return llama(**(switches | changes))


def qwen3(**changes) -> ModelConfig:
    return llama(**({"head_dim": 32, "norm_eps": 1e-6, "layers": ["qk_norm_attention"]} | changes))


def gemma2(**changes) -> ModelConfig:
    """Gemma 2's blocks, so small that windows, caps and the scalar of the scores all matter."""
    mixer = {"kind": "soft_capped_attention", "cap": 2.0, "query_pre_attention_scalar": 24}
    blocks = {
        "attention_local": {"mixer": mixer | {"window": 16}, "post_norms": True},
        "attention_global": {"mixer": mixer, "post_norms": True},
    }
    switches = {
        "norm": "rmsnorm_zero_centered",
        "activation": "geglu",
        "embedding_scale": "sqrt_hidden_size",
        "logit_cap": 3.0,
        "tie_embeddings": True,
        "head_dim": 32,
        "blocks": blocks,
        "layers": ["attention_local", "attention_global"],
    }
    return llama(**(switches | changes))


LLAMA3_SCALING = RopeScaling(
    factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_sequence_length=64
)


def build(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(config, dtype)
    initialise(model, seed)
    return model


def tokens_of(config: ModelConfig, batch: int = 2, length: int = 150, seed: int = 0) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
