"""Cross entropy over a vocabulary whose logits lie on several ranks: no rank ever holds all logits of a token.

Per token three numbers cross the group, whatever the vocabulary: the largest logit, the sum of exponentials and the
target's logit (Shoeybi et al. 2019, arXiv 1909.08053, section 3; Megatron-LM's `vocab_parallel_cross_entropy`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_llm.model.loss import IGNORED_LABEL, chunk_rows, next_token_loss_sum
from lightning_llm.parallel.layout import Layout


def loss_sum_of(layout: Layout) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of (logits, labels) that sums the losses of this rank's tokens, on whole or cut logits."""
    group = layout.group("tp")
    return next_token_loss_sum if group is None else partial(vocabulary_parallel_loss_sum, group=group)


def vocabulary_parallel_loss_sum(logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of `-log softmax(logits)[label]` over all labels that are not -100, in fp32 (fp64 for fp64).

    `logits` `[B, T, V / R]` are those of this rank's token ids, in rank order; `labels` int64 `[B, T]` the same on all.
    """
    loss: Tensor = _CrossEntropySum.apply(logits.flatten(0, -2), labels.flatten(), group)
    return loss


class _CrossEntropySum(torch.autograd.Function):
    """As `model.loss`: rows in chunks, everything in fp32, only logits and one number per row kept for backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        width = logits.shape[-1]
        largest = logits.amax(-1).to(wide)  # [N]
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        here = labels - group.rank() * width  # [N] the target's column on this rank, if it lies here
        here = here.masked_fill((here < 0) | (here >= width), -1)
        sums = torch.zeros(2, len(labels), dtype=wide, device=logits.device)  # of exponentials; the target's logit
        rows = chunk_rows(logits)
        chunks = (each.split(rows) for each in (logits, largest, here, sums[0], sums[1]))
        for row, top, column, exponentials, target in zip(*chunks, strict=True):  # [R, V / R], then [R] each
            shifted = row.to(wide) - top[:, None]
            exponentials.copy_(shifted.exp().sum(-1))
            target.copy_(shifted.gather(-1, column.clamp(min=0)[:, None])[:, 0] * (column >= 0))
            del shifted  # or the next chunk's come beside it
        dist.all_reduce(sums, group=group)
        counted = labels != IGNORED_LABEL
        ctx.save_for_backward(logits, largest + sums[0].log(), here, counted)
        return ((sums[0].log() - sums[1]) * counted).sum()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        logits, log_sums, here, counted = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        rows = chunk_rows(logits)
        chunks = (each.split(rows) for each in (logits, log_sums, here, counted, grad_logits))
        for row, log_sum, column, count, out in zip(*chunks, strict=True):
            grad = (row.to(log_sum.dtype) - log_sum[:, None]).exp_()  # softmax
            grad.scatter_add_(-1, column.clamp(min=0)[:, None], -(column >= 0).to(grad.dtype)[:, None])
            out.copy_(grad.mul_((count * grad_output)[:, None]))
            del grad
        return grad_logits, None, None
