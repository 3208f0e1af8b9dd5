"""One unit for losses of several tokenizers or units: bits per byte, where every log gives its bytes."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lightning_llm.compare.curves.columns import Unit, words_of
from lightning_llm.compare.curves.curve import LoggedCurve

BYTES_PER_TOKEN = "bytes_per_token"


def in_common_unit(curves: Sequence[LoggedCurve]) -> list[LoggedCurve]:
    """Return curves in nats per token if all are in bits, in bits per byte if tokenizers differ and bytes are given.

    Others are returned as they are; `stated_problems` reports what then does not agree.
    """
    if all(curve.loss.unit == "bits per token" for curve in curves):
        return [_scaled(curve, math.log(2), "nats per token") for curve in curves]
    if not _several_tokenizers(curves) or any(curve.loss.unit != "nats per token" for curve in curves):
        return list(curves)
    ratios = [bytes_per_token(curve) for curve in curves]
    if None in ratios:
        return list(curves)
    return [
        _scaled(curve, 1 / (math.log(2) * ratio), "bits per byte")
        for curve, ratio in zip(curves, ratios, strict=True)
        if ratio is not None
    ]


def _several_tokenizers(curves: Sequence[LoggedCurve]) -> bool:
    return any(
        len({str(curve.table.settings[key]) for curve in curves if key in curve.table.settings}) > 1
        for key in ("tokenizer", "vocab_size")
    )


def bytes_per_token(curve: LoggedCurve) -> float | None:
    """Return the bytes per token that a log states, or counts in columns of bytes and tokens; None if neither."""
    stated = curve.table.settings.get(BYTES_PER_TOKEN)
    if isinstance(stated, int | float) and stated > 0:
        return float(stated)
    for name, values in curve.table.columns.items():
        if words_of(name)[-1:] == ["bytes"] and curve.tokens is not None and curve.tokens[-1] > 0:
            known = values[np.isfinite(values)]
            if len(known) and known[-1] > 0:
                return float(known[-1] / curve.tokens[-1])
    return None


def _scaled(curve: LoggedCurve, factor: float, unit: Unit) -> LoggedCurve:
    return replace(curve, values=curve.values * factor, loss=replace(curve.loss, unit=unit))
