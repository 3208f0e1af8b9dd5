"""What a decoder starts from where it does not start from random numbers: weights that are there, by slices."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.weights.folder import Weights

MEAN_ROWS = 1024
"""How many rows are read at once where the mean of all is taken."""


class InitialWeights:
    """Elements of the parameters of a decoder of `config`: those of `weights`, and rows for tokens that these lack.

    A new token's row, of the embedding and of the head alike, is the mean of its pieces' rows, in fp32: of the tokens
    that its text was before; of all rows where it had none. Rows that pad the vocabulary are zeros: their logits
    are masked.
    """

    def __init__(self, weights: Weights, config: ModelConfig, pieces: Mapping[int, Sequence[int]] | None = None):
        """`pieces`: the ids, in the weights' vocabulary, that a new token's text has there, by the new token's id."""
        self.weights, self.config, self.pieces = weights, config, dict(pieces or {})
        self._shapes = weights.shapes
        self._mean_rows: dict[str, Tensor] = {}

    def __call__(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements `start` to `stop` of parameter `name`, counted row-major over the whole tensor: fp32, CPU.

        Both are multiples of a row's length. Raises ConfigError where the file cannot be read any more.
        """
        shape = self._shapes[name]
        width = prod(shape[1:])
        first, last = start // width, stop // width
        known = []
        if first < shape[0]:
            known = [self.weights.rows(name, first, min(last, shape[0])).to(torch.float32).reshape(-1)]
        added = [self._row(name, token, width) for token in range(max(first, shape[0]), last)]
        return torch.cat([*known, *added]) if added else known[0]

    def _row(self, name: str, token: int, width: int) -> Tensor:
        if token >= self.config.vocab_size:
            return torch.zeros(width)
        if not self.pieces[token]:
            return self._mean_row(name)
        rows = [self.weights.rows(name, piece, piece + 1)[0] for piece in self.pieces[token]]
        return torch.stack(rows).to(torch.float32).mean(dim=0)

    def _mean_row(self, name: str) -> Tensor:
        if name not in self._mean_rows:
            count = self._shapes[name][0]
            parts = (self.weights.rows(name, i, min(i + MEAN_ROWS, count)) for i in range(0, count, MEAN_ROWS))
            total = torch.stack([part.to(torch.float64).sum(dim=0) for part in parts]).sum(dim=0)
            self._mean_rows[name] = (total / count).to(torch.float32)
        return self._mean_rows[name]
