"""Numbers that every rank knows of every other, so that what comes of a collective is known to the last bit.

Rank r's element i is `weight(r)` x `base(i)`: whole numbers so small that sums over all ranks are exact in fp32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

LARGEST_EXACT = 2**24
"""Whole numbers up to here are exact in fp32."""
WEIGHTS, MOST_BITS = 61, 7


def weights(members: Sequence[int], device: torch.device) -> Tensor:
    """Return fp32 [members, 1]: `weight` of each."""
    return torch.tensor([[weight(each)] for each in members], dtype=torch.float32, device=device)


def weight(rank: int) -> int:
    """Return what tells `rank`'s numbers from its neighbours'."""
    return 1 + rank % WEIGHTS


def total_weight(members: Sequence[int]) -> int:
    """Return the sum over `members`."""
    return sum(map(weight, members))


def base(first: int, count: int, world: int, salt: int, device: torch.device) -> Tensor:
    """Return fp32 [count] of elements `first` ... of `world` ranks; another `salt`, other numbers.

    Unlike at neighbouring places, so that what lands at another place is seen (of up to 60,000 ranks).
    """
    bits = min(MOST_BITS, max(0, (LARGEST_EXACT // (WEIGHTS * world)).bit_length() - 2))
    index = torch.arange(first + salt, first + salt + count, device=device)
    return index.mul_(40503).bitwise_right_shift_(3).bitwise_and_(2**bits - 1).add_(1).float()
