"""Gaps beside a verdict's own: of the same weights without casts, and on each source of the validation set."""

import math
from collections.abc import Sequence

from lightning_llm.compare.runs.differences import validation_differences
from lightning_llm.compare.runs.losses import LOSS, Tail
from lightning_llm.compare.runs.pairing import Pair

HIGH_PRECISION = "val_loss_high_precision"


def high_precision_gap(pairs: Sequence[Pair], tail: Tail) -> float | None:
    """Return the mean gap, nats per token, of the weights of `pairs` without casts in the forward pass, over `tail`.

    None where the recipe quantises nothing, and for another metric than the loss. A baseline that casts nothing has no
    second loss, and is taken by its own.
    """
    if not (tail.metric == LOSS or tail.metric.startswith(f"{LOSS}/")):
        return None
    high = Tail(tail.metric.replace(LOSS, HIGH_PRECISION, 1), tail.steps)
    if any(set(high.steps) - set(pair.run.validations.get(high.metric, {})) for pair in pairs):
        return None
    base = [high if high.metric in pair.baseline.validations else tail for pair in pairs]
    gaps = [high.of(pair.run) - own.of(pair.baseline) for pair, own in zip(pairs, base, strict=True)]
    return math.fsum(gaps) / len(gaps) if gaps else None


def gaps_by_source(pairs: Sequence[Pair], tail: Tail) -> dict[str, float]:
    """Return {source: mean gap over `tail`, nats per token} of those that all runs scored, and each pair alike."""
    if not pairs:
        return {}
    keys = set.intersection(*(set(run.validations) for pair in pairs for run in (pair.run, pair.baseline)))
    found = {}
    for key in sorted(key for key in keys if key.startswith(f"{LOSS}/")):
        if any(validation_differences(pair.baseline, pair.run, key) for pair in pairs):
            continue
        own = Tail(key, tail.steps)
        value = math.fsum(own.of(pair.run) - own.of(pair.baseline) for pair in pairs) / len(pairs)
        if math.isfinite(value):
            found[key.removeprefix(f"{LOSS}/")] = value
    return found
