"""Cross entropy over the vocabulary, summed in fp32, without an fp32 copy of the logits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_llm.model.loss_spec import CHUNK_ELEMENTS

IGNORED_LABEL = -100


_planned_for: str | None = None
"""The kind of device whose chunks are taken, whichever the logits are on; None: theirs."""


@contextmanager
def chunked_for(kind: str) -> Iterator[None]:
    """Run the block with the loss in the chunks of a `kind` of device: "cpu" or "cuda"."""
    global _planned_for
    before, _planned_for = _planned_for, kind
    try:
        yield
    finally:
        _planned_for = before


def device_kind(tensor: Tensor) -> str:
    """Return the kind of device whose chunks are taken of `tensor`."""
    return _planned_for or tensor.device.type


def chunk_rows(logits: Tensor) -> int:
    """Return how many rows of `logits` [N, V] are worked on at once."""
    return max(1, CHUNK_ELEMENTS.get(device_kind(logits), CHUNK_ELEMENTS["cuda"]) // logits.shape[-1])


class _CrossEntropySum(torch.autograd.Function):
    """Rows are taken in chunks that stay in cache; only the logits themselves are kept for the backward pass.

    The gradient of a row's loss is `softmax(logits) - onehot(label)`, taken in fp32 and rounded once.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(logits, labels)
        wide = torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=logits.device)
        rows = chunk_rows(logits)
        for row, label in zip(logits.split(rows), labels.split(rows), strict=True):  # [R, V], [R]
            total += F.cross_entropy(row.to(wide), label, ignore_index=IGNORED_LABEL, reduction="sum")
        return total

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        logits, labels = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)  # [N, V]
        rows = chunk_rows(logits)
        for row, label, out in zip(logits.split(rows), labels.split(rows), grad_logits.split(rows), strict=True):
            counted = (label != IGNORED_LABEL)[:, None]  # [R, 1]
            in_place = out if out.dtype == grad_output.dtype else None
            grad = torch.softmax(row, dim=-1, dtype=grad_output.dtype, out=in_place)  # [R, V]
            grad.scatter_add_(-1, label.clamp(min=0)[:, None], -torch.ones_like(counted, dtype=grad.dtype))
            grad.mul_(counted * grad_output)
            if in_place is None:
                out.copy_(grad)
            del grad  # or the next chunk's comes beside it
        return grad_logits, None


def next_token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of `-log softmax(logits)[label]` over all labels that are not -100, an fp32 scalar.

    `logits` is `[B, T, V]` of any float dtype (fp64 sums in fp64), `labels` int64 `[B, T]`, already shifted: the label
    at t is the token at t + 1. The caller divides by the global count of labels.
    """
    return _CrossEntropySum.apply(logits.flatten(0, -2), labels.flatten())
