"""Rounding of updated weights to bf16 parameters (`precision.update.rounding`): stochastic, or with compensation.

A bf16 number has 8 significant bits, so a change of less than 1/512 of a weight is lost to rounding to nearest.
`stochastic` keeps it in the mean: a weight between two neighbors becomes the upper one with the probability of its
distance to the lower (Ozkara, Yu & Park 2025, arXiv 2502.20566, BF16-AdamW-SR). `kahan` keeps the rounding error of
every weight in a second bf16 tensor and adds it to the next change (Kahan 1965; for training Zamirai et al. 2020, arXiv
2010.06192, algorithm 1).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_llm.base.keyed_hash import name_word
from lightning_llm.linalg import local
from lightning_llm.parallel.torch_private import shard_offset
from lightning_llm.precision.cast.random_bits import Origin, element_words, hash_words, word

ELEMENTS_AT_ONCE = 1 << 22
"""Number of elements that an update converts to fp32 at once, so that it needs no second copy of a large parameter."""
COMPENSATION = "compensation"
"""Name of the tensor of rounding errors in the optimizer's state (`kahan`)."""


class WeightRounding:
    """Writer of updated weights to bf16 parameters by one method of rounding, in pieces of whole rows.

    The random bits of `stochastic` are a function of (seed, update, name of the parameter, place in the whole tensor),
    so every layout rounds in the same way.
    """

    def __init__(
        self,
        rounding: Literal["stochastic", "kahan"],
        parameters: Iterable[tuple[str, nn.Parameter]],
        seed: int,
        updates: Callable[[], int],
    ):
        """Prepare to round the parameters of an optimizer.

        Args:
            rounding: the method.
            parameters: all parameters of the optimizer with their names in the whole model.
            seed: of the random bits.
            updates: returns the number of updates made so far, which selects the random bits.
        """
        self.rounding, self.seed, self.updates = rounding, seed, updates
        self._words = {id(parameter): name_word(name) for name, parameter in parameters}

    def initial_state(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return {"compensation": zeros, sharded like the parameter} for `kahan`, and {} for `stochastic`."""
        return {COMPENSATION: torch.zeros_like(parameter, requires_grad=False)} if self.rounding == "kahan" else {}

    @torch.no_grad()
    def update(
        self, parameter: nn.Parameter, state: dict[str, Tensor], change: Callable[[Tensor, slice], Tensor]
    ) -> None:
        """Update this rank's part of a parameter in place: replace its weights by the rounded results of `change`.

        `change(weights, rows)` takes fp32 weights [rows, ...], which it may overwrite, and their slice of the first
        axis, and returns the updated weights in fp32. `state`: the parameter's state in the optimizer.
        """
        weight, kept = local(parameter), local(state.get(COMPENSATION))
        for rows in pieces(weight):
            exact = weight[rows].float()
            if kept is not None:
                exact += kept[rows]
            exact = change(exact, rows)
            if kept is None:
                weight[rows] = rounded_stochastically(exact, self._random_bits(parameter, exact, rows))
            else:
                weight[rows] = exact.to(weight.dtype)
                kept[rows] = (exact - weight[rows].float()).to(kept.dtype)

    def _random_bits(self, parameter: nn.Parameter, part: Tensor, rows: slice) -> Tensor:
        """Return 32 random bits per element of `part`, the given rows of this rank's part, as int32."""
        offset = shard_offset(parameter) if isinstance(parameter, DTensor) else (0,) * parameter.ndim
        key = hash_words(self.updates(), self._words[id(parameter)], seed=self.seed).to(part.device)
        if part.ndim == 1:  # one column, so that its elements are rows
            offset, part = (*offset, 0), part.unsqueeze(1)
        whole = parameter.shape[1:].numel() if parameter.ndim > 1 else 1
        origin = Origin(offset[0] + rows.start, offset[1], whole)
        flat = part.flatten(1)
        first = word(origin.rows(len(flat), part.device) * whole + origin.column)
        columns = torch.arange(flat.shape[1], device=part.device, dtype=torch.int32)
        return element_words(key, first.unsqueeze(1) + columns)


def pieces(tensor: Tensor) -> Iterator[slice]:
    """Yield slices of the first axis of `tensor`, of at most `ELEMENTS_AT_ONCE` elements or one row."""
    rows = max(1, ELEMENTS_AT_ONCE // max(1, tensor.shape[1:].numel()))
    for start in range(0, len(tensor), rows):
        yield slice(start, min(start + rows, len(tensor)))


def rounded_stochastically(exact: Tensor, bits: Tensor) -> Tensor:
    """Return fp32 `exact` rounded to bf16, up in magnitude with the probability of the fraction that bf16 cuts off.

    `bits`: int32 of as many elements. bf16 is the upper half of fp32: the upper 16 of the random bits are added to the
    lower half, and the carry rounds. Numbers of bf16 stay; so do Inf and NaN.
    """
    noise = ((bits >> 16) & 0xFFFF).view(exact.shape)
    raised = (exact.contiguous().view(torch.int32) + noise) & -0x10000
    return torch.where(exact.isfinite(), raised.view(torch.float32), exact).to(torch.bfloat16)
