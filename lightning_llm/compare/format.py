"""Numbers as text (losses, gaps, counts, shares of tokens) and as JSON, where a number that is not finite is null."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any


def more_or_fewer(share: float, interval: tuple[float, float]) -> str:
    """Return a share of further tokens as text: "4.1 % more tokens [2.0, 6.5]", and -0.002 as "0.2 % fewer tokens".

    Bounds refer to the word before them: [-0.003, -0.001] more is [0.1, 0.3] fewer. "beyond": a bound beyond the runs
    (infinite or -1). Without an interval (NaN) there are no brackets.
    """
    fewer = round(100 * share, 1) < 0
    bounds = tuple(-each for each in reversed(interval)) if fewer else interval
    text = f"{100 * abs(share):.1f} % {'fewer' if fewer else 'more'} tokens"
    if any(math.isnan(each) for each in bounds):
        return text
    known = (math.isfinite(b) and (-b if fewer else b) > -1 for b in bounds)
    bounds_text = (f"{round(100 * b, 1) + 0.0:.1f}" if k else "beyond" for b, k in zip(bounds, known, strict=True))
    return f"{text} [{', '.join(bounds_text)}]"


def nats(value: float, *, signed: bool = False) -> str:
    """Return a loss or a gap with four decimals, or in exponent notation if it is too wide for a table."""
    sign = "+" if signed else ""
    return format(value, f"{sign}.4f" if not 1e5 <= abs(value) < math.inf else f"{sign}.2e")


def interval_text(low: float, high: float) -> str:
    """Return an interval in brackets: "[-0.0002, +0.0044]"."""
    return f"[{nats(low, signed=True)}, {nats(high, signed=True)}]"


def minus(text: str) -> str:
    """Return `text` with typographic minus signs before negative numbers, for print."""
    return re.sub(r"(?<!\w)-(?=[\d.]|inf)", "−", text)


def short(number: int | float | None) -> str:
    """Return a count with three significant digits: 6.9M, 1.6M, 768K."""
    if number is None:
        return "unknown"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def per_parameter(tokens: int, parameters: int) -> str:
    """Return tokens per parameter with two significant digits: 0.023, 5.5, 160."""
    return short(float(f"{tokens / parameters:.2g}"))


def count(number: int, noun: str) -> str:
    """Return a number with its noun: "1 pair", "3 pairs"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def seeds_text(seeds: Sequence[int]) -> str:
    """Return a list of seeds as text: "seed 0", "seeds 0, 1"."""
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def finite(value: float) -> float | None:
    """Return `value`, or None if it is not finite, which JSON cannot represent."""
    return value if math.isfinite(value) else None


def json_ready(value: Any) -> Any:
    """Return nested data with None for every number that is not finite."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, Mapping):
        return {key: json_ready(each) for key, each in value.items()}
    return [json_ready(each) for each in value] if isinstance(value, list | tuple) else value


def as_json(value: Any) -> str:
    """Return `value` as JSON, with null for every number that is not finite."""
    return json.dumps(json_ready(value), indent=1, default=str, allow_nan=False)
