"""Columns of numbers from the cells or values of a log's rows."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lightning_llm.compare.curves.table import Column

SETTINGS = (
    "seed", "total_steps", "global_batch_size", "sequence_length", "tokens_per_step", "tokenizer", "vocab_size",
    "loss_unit", "world_size", "bytes_per_token",
)  # fmt: skip
"""Facts that a log may repeat in each row, as a constant column."""
SEPARATED = re.compile(r"[-+]?\d[\d.,_' ]*\d(?:[eE][-+]?\d+)?")
"""Numbers with a decimal comma, or with separators of thousands."""
NON_FINITE = {"nan", "inf", "+inf", "-inf", "infinity", "+infinity", "-infinity"}


def number(value: Any) -> float | None:
    """Return a logged value as a float, infinity for NaN; None if it is no number.

    Text with a number counts, since several loggers write numbers in quotation marks; underscores do not.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        text = value.strip().lower()
        if text in NON_FINITE:
            return math.inf
        if "_" in text:
            return None
        try:
            value = float(text)
        except ValueError:
            return None
    if not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return math.inf
    return found if math.isfinite(found) else math.inf


def columns_of(
    rows: Iterable[tuple[int, Mapping[str, Any]]],
) -> tuple[dict[str, Column], dict[str, str], dict[str, Any]]:
    """Return ({column: numbers}, {mixed column: its first text}, {setting: value}) of rows, (line, {name: value}).

    None and blank text count as missing.
    """
    rows = list(rows)
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    columns: dict[str, Column] = {}
    mixed: dict[str, str] = {}
    settings: dict[str, Any] = {}
    for name in names:
        values = np.full(len(rows), math.nan)
        texts: list[tuple[int, str]] = []
        for at, (line, row) in enumerate(rows):
            value = row.get(name)
            if value is None or (isinstance(value, str) and not value.strip()):
                continue
            found = number(value)
            if found is None:
                texts.append((line, str(value).strip()))
            else:
                values[at] = found
        has_numbers = bool(np.isfinite(values).any() or np.isinf(values).any())
        separated = bool(texts) and SEPARATED.fullmatch(texts[0][1]) is not None
        if texts and (has_numbers or separated):
            allowed = " (numbers have a decimal point and no other separator)" if separated else ""
            mixed[name] = f"{texts[0][1][:40]!r} in line {texts[0][0]}{allowed}"
        elif has_numbers:
            columns[name] = values
        distinct = {text for _, text in texts} or set(values[~np.isnan(values)].tolist())
        if name in SETTINGS and len(distinct) == 1:
            (only,) = distinct
            settings[name] = int(only) if isinstance(only, float) and only.is_integer() else only
    return columns, mixed, settings
