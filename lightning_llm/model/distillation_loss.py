"""The divergence of a student from its teachers, summed in fp32, without an fp32 copy of the student's logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_llm.model.loss import IGNORED_LABEL, chunk_rows


class _DivergenceSum(torch.autograd.Function):
    """Rows in chunks, as in `loss.py`. The gradient of a row by its logits z is `t (softmax(z / t) - softmax(e / t))`
    for teachers' logits e, temperature t and the loss `t^2 KL` (Hinton et al. 2015, arXiv 1503.02531, section 2)."""

    @staticmethod
    def forward(ctx, logits: Tensor, teachers: Tensor, labels: Tensor, temperature: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(logits, teachers, labels)
        ctx.temperature = temperature
        wide = torch.promote_types(logits.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=logits.device)
        rows, real = chunk_rows(logits), teachers.shape[-1]
        for row, teacher, label in zip(logits.split(rows), teachers.split(rows), labels.split(rows), strict=True):
            log_q = F.log_softmax(row.to(wide) / temperature, dim=-1)[:, :real]  # [R, V]
            log_p = F.log_softmax(teacher.to(wide) / temperature, dim=-1)  # [R, V]
            divergence = (log_p.exp() * (log_p - log_q)).sum(-1)  # [R]
            total += divergence.masked_fill(label == IGNORED_LABEL, 0.0).sum() * temperature**2
        return total

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[no-untyped-def]
        logits, teachers, labels = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)  # [N, V]
        rows, real, wide = chunk_rows(logits), teachers.shape[-1], grad_output.dtype
        chunks = (each.split(rows) for each in (logits, teachers, labels, grad_logits))
        for row, teacher, label, out in zip(*chunks, strict=True):
            grad = torch.softmax(row.to(wide) / ctx.temperature, dim=-1)  # [R, V]
            grad[:, :real] -= torch.softmax(teacher.to(wide) / ctx.temperature, dim=-1)
            out.copy_(grad.mul_((label != IGNORED_LABEL)[:, None] * (grad_output * ctx.temperature)))
        return grad_logits, None, None, None


def divergence_sum(logits: Tensor, teachers: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the sum of `temperature^2 KL(teachers || student)` over all labels that are not -100, an fp32 scalar.

    `logits` of the student are `[B, T, V]` of any float dtype (fp64 sums in fp64), padding included; `teachers`, whose
    softmax is what they predict, `[B, T, vocab_size]`; `labels` int64 `[B, T]`. Teachers get no gradient.
    """
    real = teachers.shape[-1]
    return _DivergenceSum.apply(logits.flatten(0, -2), teachers.reshape(-1, real), labels.flatten(), temperature)
