"""Training samples that a run leaves out, as ranges [first, last] of the whole order.

Position p of a run is the p-th sample of the order that is not left out. So the address of
a batch stays a function of its step and of this list alone.
"""

from collections.abc import Iterable, Sequence

Range = tuple[int, int]
SKIPPED_SAMPLES = "skipped_samples"
"""The key of progress.json and summary.json for the samples left out."""


def merged(ranges: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    """Return `ranges` in order, those that overlap or touch as one."""
    found: list[Range] = []
    for first, last in sorted((int(first), int(last)) for first, last in ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def index_of(position: int, skipped: Sequence[Range]) -> int:
    """Return the index in the whole order of the sample at `position` (both from 0) without the merged `skipped`."""
    index = position
    for first, last in skipped:
        if index < first:
            break
        index += last - first + 1
    return index


def before(index: int, skipped: Sequence[Range]) -> tuple[Range, ...]:
    """Return the part of the merged `skipped` before sample `index` of the whole order."""
    return tuple((first, min(last, index - 1)) for first, last in skipped if first < index)
