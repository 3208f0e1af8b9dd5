"""Numbers that every rank knows of every other, so that what comes of a collective is known to the last bit.

Rank r's element i is `weight(r)` x `base(i)`: whole numbers so small that sums over all ranks are exact in fp32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

LARGEST_EXACT = 2**24
"""Whole numbers up to here are exact in fp32."""
WEIGHTS, BASES = 61, 127


def weight(rank: int) -> int:
    """Return what tells `rank`'s numbers from its neighbours'."""
    return 1 + rank % WEIGHTS


def total_weight(members: Sequence[int]) -> int:
    """Return the sum over `members`."""
    return sum(map(weight, members))


def base(first: int, count: int, world: int, salt: int, device: torch.device) -> Tensor:
    """Return fp32 [count] of elements `first` ... of `world` ranks; another `salt`, other numbers.

    Unlike at neighbouring places, so that what lands at another place is seen.
    """
    largest = max(1, min(BASES, LARGEST_EXACT // (WEIGHTS * world)))
    index = torch.arange(first + salt, first + salt + count, device=device)
    return ((index * 40503 >> 3) % largest + 1).float()
