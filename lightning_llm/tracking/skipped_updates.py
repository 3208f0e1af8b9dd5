"""Rule for a run that skips its updates to the end: recovery that recovers nothing is a failure. Imports no torch."""

import math

FEWEST_STEPS = 10
SHARE = 100
"""One step in so many."""


def stalled(steps: int, skipped_in_a_row: int) -> bool:
    """Return whether a run of `steps` steps skipped the update of each of its last max(10, 1 %) steps, or of all.

    `skipped_in_a_row`: steps up to the last one whose updates were skipped. A loss scale that starts too high skips a
    few updates, and then makes some.
    """
    return steps > 0 and skipped_in_a_row >= min(steps, max(FEWEST_STEPS, math.ceil(steps / SHARE)))
