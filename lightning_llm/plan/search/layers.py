"""What each block should recompute: a dynamic programme over blocks and memory."""

from collections.abc import Sequence

import numpy as np

UNITS = 4096
"""Into how many parts the memory is cut; a block's bytes are rounded up to them, so that what is found fits."""


def cheapest_modes(
    seconds: Sequence[Sequence[float]], sizes: Sequence[Sequence[int]], budget: int, units: int = UNITS
) -> list[int] | None:
    """Return for each layer the number of the way to run it, so that the sum of seconds is least; None: none fits.

    Args:
        seconds: of each layer, [layers][ways].
        sizes: bytes that each layer then holds, [layers][ways], not negative.
        budget: bytes that all layers may hold together.
        units: parts of the budget; exact where it has no more bytes than that.

    Galvatron's recurrence (Miao et al. 2022, arXiv 2211.13878, section 3.3) with no cost between layers, since ours lie
    on ranks alike: of layers up to l in e units, f(l, e) = min over ways s of f(l - 1, e - size(l, s)) + time(l, s).
    """
    if budget < 0:
        return None
    unit = max(1, -(-budget // units))
    room = budget // unit
    best = np.zeros(room + 1)
    chosen = np.empty((len(seconds), room + 1), dtype=np.int16)
    needed = [[-(-size // unit) for size in each] for each in sizes]
    for layer, (times, each) in enumerate(zip(seconds, needed, strict=True)):
        ways = np.full((len(times), room + 1), np.inf)
        for way, (time, size) in enumerate(zip(times, each, strict=True)):
            if size <= room:
                ways[way, size:] = best[: room + 1 - size] + time
        chosen[layer] = ways.argmin(axis=0)
        best = ways.min(axis=0)
    if not np.isfinite(best[room]):
        return None
    found, left = [], room
    for layer in reversed(range(len(seconds))):
        way = int(chosen[layer, left])
        found.append(way)
        left -= needed[layer][way]
    return found[::-1]
