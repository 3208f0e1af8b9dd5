"""The global gradient norm, and clipping to it."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> float:
    """Scale all gradients by min(1, max_norm / norm) in place; return the 2-norm from before, summed in fp64.

    fp64 makes the norm independent of how the gradients are cut into shards. `max_norm` None measures only.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms: list[Tensor] = list(torch._foreach_norm(gradients, 2, dtype=torch.float64))
    total = torch.linalg.vector_norm(torch.stack(norms)).item()
    if max_norm is not None and total > max_norm:
        torch._foreach_mul_(gradients, max_norm / total)
    return total
