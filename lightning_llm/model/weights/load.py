"""Weights of a folder for a decoder: slices for the ranks of a run, or a whole decoder on one device."""

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.linalg.grouped import GroupedLinear
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.linear import Linear
from lightning_llm.model.structure import VOCABULARY, parameter_shapes
from lightning_llm.model.weights.folder import Weights

MEAN_ROWS = 1024
"""Number of rows read at once for the mean of all."""


class InitialWeights:
    """Source of a run's initial parameters, read by slices: the elements of `weights`, and rows of new tokens.

    A new token's row, in embedding and head, is the fp32 mean of the rows of its pieces: the tokens that its text had
    before; the mean of all rows if it had none. Rows that pad the vocabulary are zeros: their logits are masked.
    """

    def __init__(self, weights: Weights, config: ModelConfig, pieces: Mapping[int, Sequence[int]] | None = None):
        """`config`: model of the run. `pieces`: {id of a new token: ids of its text in the vocabulary of `weights`}."""
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


def state_dict_of(weights: Weights, config: ModelConfig | None = None) -> Mapping[str, Tensor]:
    """Return all parameters for `Decoder.load_state_dict`: fp32 on the CPU, with zeros as rows that pad the vocabulary.

    `config`: model of the decoder; None: that of `weights`.
    """
    config = config or weights.config
    return whole_state(InitialWeights(weights, config), config)


def whole_state(initial: Callable[[str, int, int], Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return all parameters of a `Decoder` of `config` by name, fp32 on the CPU, read from the slices of `initial`.

    `initial(name, start, stop)` returns elements of a parameter, as `InitialWeights` does.
    """
    state = {}
    for name, shape in parameter_shapes(config).items():
        rows = config.padded_vocab_size if name in VOCABULARY else shape[0]
        state[name] = initial(name, 0, rows * prod(shape[1:])).view(rows, *shape[1:])
    return state


def whole_decoder(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    compute_dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    swap: Callable[[Decoder], object] = lambda model: None,
) -> Decoder:
    """Return a decoder of `config` with the parameters `weights`, by our names, on `device` (None: the CPU).

    Activations are in `compute_dtype`, parameters in `dtype`. A tensor that already has the right dtype and device is
    reused, not copied. `swap` replaces layers of the decoder while it is on the meta device. Raises RuntimeError if
    names or shapes differ from the decoder's.
    """
    with torch.device("meta"):
        model = Decoder(config, compute_dtype)
    swap(model)
    at = device or torch.device("cpu")
    model.load_state_dict({name: tensor.to(at, dtype) for name, tensor in weights.items()}, assign=True)
    return model


def frozen_decoder(
    config: ModelConfig, weights: Mapping[str, Tensor], compute_dtype: torch.dtype, device: torch.device
) -> Decoder:
    """Return a decoder for inference with fp32 `weights` (by name) on `device`; see `frozen`."""
    return frozen(whole_decoder(config, weights, compute_dtype, device=device), compute_dtype)


def frozen(model: Decoder, compute_dtype: torch.dtype) -> Decoder:
    """Prepare `model` for inference, in place, and return it: evaluation mode, no gradients, linears in
    `compute_dtype`.

    So linear layers do not cast their weights again in every forward pass.
    """
    for module in model.modules():
        if isinstance(module, Linear | GroupedLinear):
            module.to(compute_dtype)
    return model.eval().requires_grad_(False)
