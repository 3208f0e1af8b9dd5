"""A margin as it is typed, for `compare --margin` and `sweep.margin`: nats per token, or a share of tokens."""

import math

MOST_PERCENT = 50.0
"""Of a margin in tokens."""


def read_margin(word: str | float) -> tuple[float, float | None]:
    """Return (nats, None) of 0.01 or "0.01", and (NaN, 0.02) of "2%".

    Raises:
        ValueError: it is neither.
    """
    text = str(word).strip()
    in_tokens = text.endswith("%")
    try:
        value = math.nan if isinstance(word, bool) else float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        said = f"is {text}, must be above 0: nats per token (0.01), or tokens more that the recipe may need (2%)"
        raise ValueError(said)
    if in_tokens and value > MOST_PERCENT:
        said = f"is {text}; a margin in tokens is at most {MOST_PERCENT:g}%, which half the tokens show"
        raise ValueError(said)
    return (math.nan, value / 100) if in_tokens else (value, None)
