"""Parameters and FLOPs of a decoder by formula, without building it.

Letters: L layers, D hidden_size, H query heads, G key/value heads, K head dimension, F ffn_hidden_size, V vocabulary.
"""

import math
from dataclasses import dataclass

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.structure import block_parameters, block_parts, for_layers, norm_of


@dataclass(frozen=True)
class ParameterCount:
    """Elements by kind; a tied head counts once, as `embedding`. Rows that pad the vocabulary count where asked for."""

    embedding: int
    position_embedding: int
    head: int
    linear: int  # weights of the linears inside the blocks
    active_linear: int  # those of them that multiply each token: of experts only the chosen
    bias: int
    norm: int  # and other parameters of the blocks that are no linear's

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.position_embedding + self.head + self.non_embedding

    @property
    def non_embedding(self) -> int:
        """Parameters of the blocks and of the last norm (the N of Kaplan et al. 2020, arXiv:2001.08361)."""
        return self.linear + self.bias + self.norm

    @property
    def active(self) -> int:
        """All parameters but the weights of experts that a token does not pass."""
        return self.total - self.linear + self.active_linear


def count_parameters(config: ModelConfig, padded: bool = False) -> ParameterCount:
    """Return the parameter count with the true vocabulary, as papers publish it, or `padded`, as stored in memory."""
    rows = config.padded_vocab_size if padded else config.vocab_size
    hidden, layers = config.hidden_size, range(config.num_layers)
    in_blocks = for_layers(config, layers, lambda index: _in_block(config, index))
    linear, active, bias, own = map(sum, zip(*in_blocks, strict=True))
    return ParameterCount(
        embedding=rows * hidden,
        position_embedding=config.max_sequence_length * hidden if config.position == "learned" else 0,
        head=0 if config.tie_embeddings else rows * hidden,
        linear=linear,
        active_linear=active,
        bias=bias,
        norm=own + hidden * len(norm_of(config).vectors(config)),
    )


def _in_block(config: ModelConfig, index: int) -> tuple[int, int, int, int]:
    """Return elements in block `index`: (weights of linears, those that multiply a token, biases, all others)."""
    parts = block_parts(config, index).values()
    linears = [linear for part in parts for linear in part.linears(config)]
    weights = sum(linear.elements for linear in linears)
    biases = sum(linear.outputs.length for linear in linears if linear.bias)
    every = sum(math.prod(parameter.shape) for parameter in block_parameters(config, index))
    return weights, sum(linear.active_elements for linear in linears), biases, every - weights - biases


def flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """Return the model FLOPs of training on one token (forward and backward): `6 N + 12 L H K T`.

    Chowdhery et al. 2022 (PaLM, arXiv:2204.02311) appendix B. N are the weights that multiply each token: the linears
    of the blocks (of experts those that a token passes) and the head (tied or not) over the true vocabulary; embedding
    look-ups, biases, norms and padding are excluded. The second term is the parts' work outside their linears. For
    attention it is q k^T and the product with v over all T = `sequence_length` keys: like the paper and most reports of
    MFU it includes the acausal half, but it excludes keys outside a window. Recomputation never counts.
    """
    matmul_weights = count_parameters(config).active_linear + config.vocab_size * config.hidden_size
    layers = range(config.num_layers)
    return 6 * matmul_weights + sum(for_layers(config, layers, lambda at: _mixing(config, at, sequence_length)))


def _mixing(config: ModelConfig, index: int, sequence_length: int) -> int:
    return sum(part.flops_per_token(config, sequence_length) for part in block_parts(config, index).values())


CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 27}
"""Logits that the loss takes to fp32 at once, by kind of device."""

WHOLE_LOGITS = {"cpu": 1 << 26, "cuda": 1 << 29}
"""Logits of a micro-batch, by kind of device, that are there at once at most: 128 MB and 1 GB of bf16. Of each chunk
the weight's gradient is added to an fp32 sum, 8 bytes of memory traffic per element: few and large ones are better."""
ROWS_PER_COLUMN = 4
"""Rows of hidden states for each of their columns, from which on chunks are made. They save 2 x 2 bytes of bf16 logits
and their gradient for each row and id, and take up to 6 bytes of the weight's gradient and its sum for each column."""


def rows_at_once(rows: int, columns: int, ids: int, kind: str) -> int:
    """Return how many of the `rows` of logits [rows, ids] are in memory at once on a `kind` of device.

    All, or about equally many in each chunk.
    """
    if rows < ROWS_PER_COLUMN * columns:
        return rows
    chunks = -(-rows * ids // WHOLE_LOGITS.get(kind, WHOLE_LOGITS["cuda"]))
    return -(-rows // max(1, chunks))
