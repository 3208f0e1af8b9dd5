"""Parameters, FLOPs and chunks of logits of a decoder by formula, without building it. Imports no torch.

Letters: L layers, D hidden_size, H query heads, G key/value heads, K head dimension, F ffn_hidden_size, V vocabulary.
"""

import math
from dataclasses import dataclass

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.structure import block_parameters, block_parts, for_layers, norm_of


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters (elements) of a decoder by kind."""

    embedding: int
    """Token embedding, including a tied head."""
    position_embedding: int
    head: int
    """An untied head."""
    linear: int
    """Weights of the linear layers in the blocks."""
    active_linear: int
    """Those of them that multiply each token: of experts only the chosen ones."""
    bias: int
    norm: int
    """Norms, and all other parameters of the blocks."""

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.embedding + self.position_embedding + self.head + self.non_embedding

    @property
    def non_embedding(self) -> int:
        """Number of parameters of the blocks and of the last norm (the N of Kaplan et al. 2020, arXiv:2001.08361)."""
        return self.linear + self.bias + self.norm

    @property
    def active(self) -> int:
        """Number of parameters that one token uses: all but the weights of experts that it is not sent to."""
        return self.total - self.linear + self.active_linear


def count_parameters(config: ModelConfig, padded: bool = False) -> ParameterCount:
    """Return the numbers of parameters of a decoder by kind.

    With the true vocabulary, as papers publish them; `padded`: with rows that pad the vocabulary, as stored in memory.
    """
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
"""Number of logits that the loss converts to fp32 at once, by kind of device."""

WHOLE_LOGITS = {"cpu": 1 << 26, "cuda": 1 << 29}
"""Largest number of logits of a micro-batch in memory at once, by kind of device: 128 MB and 1 GB of bf16. For each
chunk the gradient of the head's weight is added to an fp32 sum, 8 bytes of memory traffic per element, so few large
chunks are better."""
ROWS_PER_COLUMN = 4
"""Logits are computed in chunks if the hidden states have at least this many times more rows than columns. Chunks save
2 x 2 bytes of bf16 logits and their gradient per row and id, and need up to 6 bytes of the weight's gradient and its
sum per column and id."""


def rows_at_once(rows: int, columns: int, ids: int, kind: str) -> int:
    """Return the number of rows of a chunk of logits [rows, ids]: all `rows`, or so few that chunks are about equal.

    `columns`: of the hidden states [rows, columns] that logits are computed from. `kind`: kind of device, "cpu" or
    "cuda".
    """
    if rows < ROWS_PER_COLUMN * columns:
        return rows
    chunks = -(-rows * ids // WHOLE_LOGITS.get(kind, WHOLE_LOGITS["cuda"]))
    return -(-rows // max(1, chunks))
