"""What a rank is handed for a step, and for a micro-batch of validation.

Letters: A micro-batches per rank and step (gradient accumulation), B micro-batch size, T sequence length.
"""

from dataclasses import dataclass, fields, replace
from typing import TypeVar

from torch import Tensor

B = TypeVar("B", "Batch", "ValidationBatch")


@dataclass(frozen=True)
class Batch:
    """What one rank computes in one step: int64 [A, B, T] each; `labels[..., t]` is the token after `tokens[..., t]`.

    `document_ids` counts documents from 0 within each row, None unless `data.document_mask`.
    """

    tokens: Tensor
    labels: Tensor
    document_ids: Tensor | None

    def pin_memory(self) -> "Batch":
        """Return it in page-locked memory, from which a copy to CUDA does not wait; a `DataLoader` asks for it."""
        return _pinned(self)


@dataclass(frozen=True)
class ValidationBatch:
    """Like one micro-batch of `Batch`: int64 [B, T], labels -100 where there is no target; `sources` int64 [B].

    Rows that only fill up the last batch have no target at all, and source 0.
    """

    tokens: Tensor
    labels: Tensor
    document_ids: Tensor | None
    sources: Tensor

    def pin_memory(self) -> "ValidationBatch":
        """Return it in page-locked memory, as `Batch.pin_memory` does."""
        return _pinned(self)


def _pinned(batch: B) -> B:
    tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: value.pin_memory() for name, value in tensors.items() if value is not None})
