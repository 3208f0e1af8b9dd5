"""Parameters and FLOPs of a decoder by formula, without building it.

Letters: L layers, D hidden_size, H query heads, G key/value heads, K head dimension, F ffn_hidden_size, V vocabulary.
"""

from dataclasses import dataclass

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.linear_names import block_linears


@dataclass(frozen=True)
class ParameterCount:
    """Elements by kind; a tied head counts once, as `embedding`. Rows that pad the vocabulary count where asked for."""

    embedding: int
    position_embedding: int
    head: int
    linear: int  # weights of the linears inside the blocks
    bias: int
    norm: int

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.position_embedding + self.head + self.non_embedding

    @property
    def non_embedding(self) -> int:
        """Parameters of the blocks and of the last norm (the N of Kaplan et al. 2020, arXiv:2001.08361)."""
        return self.linear + self.bias + self.norm


def count_parameters(config: ModelConfig, padded: bool = False) -> ParameterCount:
    """Return the parameter count: of the true vocabulary (what papers publish), or `padded` as held in memory."""
    rows = config.padded_vocab_size if padded else config.vocab_size
    hidden, layers = config.hidden_size, config.num_layers
    linears = block_linears(config)
    vectors_per_norm = 2 if config.norm == "layernorm" and config.bias else 1
    return ParameterCount(
        embedding=rows * hidden,
        position_embedding=config.max_sequence_length * hidden if config.position == "learned" else 0,
        head=0 if config.tie_embeddings else rows * hidden,
        linear=layers * sum(each.in_features * each.out_features for each in linears),
        bias=layers * sum(each.out_features for each in linears) if config.bias else 0,
        norm=(2 * layers + 1) * hidden * vectors_per_norm,
    )


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Return the model FLOPs of training on one token (forward and backward): `6 N + 12 L H K T`.

    Chowdhery et al. 2022 (PaLM, arXiv:2204.02311) appendix B. N are the weights that multiply each token: the linears
    of the blocks and the head (tied or not) over the true vocabulary; the embedding look-ups, biases and norms are
    left out, and so is padding. The second term is q k^T and the product with v over all T = `sequence_length` keys:
    the causal half is not taken off, as the paper and most reports of MFU do. Recomputation never counts.
    """
    matmul_weights = count_parameters(config).linear + config.vocab_size * config.hidden_size
    attention = 12 * config.num_layers * config.num_heads * config.attention_head_dim * sequence_length
    return 6 * matmul_weights + attention
