"""Batches: one rank's tensors of an optimizer step, and of a validation micro-batch.

Letters: A micro-batches per rank and step (gradient accumulation), B micro-batch size, T sequence length.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Tensors:
    """Named tensors; some may be None."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Return the batch on `device`; `non_blocking`: see `Tensor.to`."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Return a copy in page-locked memory, which allows asynchronous copies to CUDA. Called by `DataLoader`."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Self:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: change(value) for name, value in tensors.items() if value is not None})


@dataclass(frozen=True)
class Batch(_Tensors):
    """One rank's share of a step: int64 [A, B, T] each; `labels[..., t]` is the token after `tokens[..., t]`.

    `document_ids` counts documents from 0 within each row, None unless `data.document_mask`.
    """

    tokens: Tensor
    labels: Tensor
    document_ids: Tensor | None


@dataclass(frozen=True)
class ValidationBatch(_Tensors):
    """Like one micro-batch of `Batch`: int64 [B, T], labels -100 where there is no target; `sources` int64 [B].

    Rows that only fill up the last batch have no target at all, and source 0.
    """

    tokens: Tensor
    labels: Tensor
    document_ids: Tensor | None
    sources: Tensor
