"""Rotation of groups along one axis by a registered transform, such as the random Hadamard transform.

Both operands of a GEMM are rotated by the same orthogonal diag(signs) S_g along the contraction axis, so
(A S)(S^T B) = A B and nothing needs to be undone. An axis that is no multiple of g is padded with zeros to whole
groups, in both operands: the padding adds zeros to each sum, so the product stays the same.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_llm.config.schema.cast_kinds import TRANSFORMS
from lightning_llm.linalg.gemm import operand, product


@lru_cache(maxsize=32)  # also for GPU tensors: a copy in each cast would wait for all queued work
def _matrix(transform: str, size: int, device: torch.device) -> Tensor:
    """Return the matrix of a registered transform, [size, size] fp32."""
    made: Tensor = TRANSFORMS.instance(transform).matrix(size)
    return made.to(device)


@lru_cache(maxsize=32)
def fixed_signs(vector: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a recipe's fixed signs, fp32 [len(vector)]."""
    return torch.tensor(vector, dtype=torch.float32, device=device)


def rotation(size: int, signs: Tensor | None, device: torch.device, transform: str = "hadamard") -> Tensor:
    """Return diag(signs) S, [size, size] fp32, S of `transform`; `signs` [size] of +1 and -1, None for all +1."""
    s = _matrix(transform, size, device)
    return s if signs is None else s * signs.float()[:, None]


def rotate(x: Tensor, s: Tensor, axis: int, round_to: torch.dtype, transform: str = "hadamard") -> Tensor:
    """Return 2-D `x` with each group of g along `axis` replaced by group @ s; s [g, g]; result in `round_to`.

    The axis is padded with zeros to whole groups. fp32 accumulation. With `round_to` bf16 and a bf16 x the GEMM itself
    runs in bf16 if the entries of s are exact in it (of Hadamard matrices g = 4, 16, 64, 256), and rounds once, at the
    end.
    """
    size = s.shape[0]
    if missing := -x.shape[axis] % size:
        x = F.pad(x, (0, missing) if axis == 1 else (0, 0, 0, missing))
    rows, columns = x.shape
    exact_in_bf16 = TRANSFORMS.instance(transform).exact_in_bf16(size)
    dtype = torch.bfloat16 if x.dtype == round_to == torch.bfloat16 and exact_in_bf16 else torch.float32
    x, s = operand(x.to(dtype)), operand(s.to(dtype))
    if axis == 1:
        return product(x.reshape(-1, size), s).reshape(rows, columns).to(round_to)
    return product(s.T, x.reshape(rows // size, size, columns)).reshape(rows, columns).to(round_to)
