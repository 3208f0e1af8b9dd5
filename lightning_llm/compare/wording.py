"""A verdict in words: what has to be said beside the numbers, and everything in one line."""

from typing import Any

from lightning_llm.compare.estimate import STAND_IN_FACTOR
from lightning_llm.compare.statistics import MOST_SEEDS, PLANNED_GAP, POWER


def line_of(row: dict[str, Any]) -> str:
    """Return a verdict in one line: with the model's size, the tokens and the margin, every time."""
    numbers = []
    if row["gap"] is not None:
        numbers.append(f"gap {row['gap']:+.4f}")
    if row["identical"]:
        numbers.append("equal to the last bit")
    elif row["ci"][0] is not None:
        numbers.append(f"{100 * row['confidence']:g} % CI [{row['ci'][0]:+.4f}, {row['ci'][1]:+.4f}]")
    numbers.append(_count(row["pairs"], "pair"))
    if row["aa_floor"] is not None:
        numbers.append(f"A/A floor {row['aa_floor']:.4f}")
    scale = f"{short(row['parameters'])} parameters, {short(row['tokens'])} tokens"
    reason = f", {row['reason']}" if row["reason"] else ""
    verdict = f"{row['verdict']} against {row['baseline']} at margin {row['margin']:g}"
    text = f"{row['name']} at {scale}: {verdict} ({', '.join(numbers)}){reason}"
    if not row["controlled"]:
        keys = [each["key"] for each in row["confounders"]]
        more = f" and {len(keys) - 4} more" if len(keys) > 4 else ""
        text += f"; not controlled: the runs differ in {', '.join(keys[:4])}{more} too"
    return text


def reason_of(row: dict[str, Any]) -> str:
    """Return what has to be said beside the numbers, as one phrase; empty where they say it all."""
    parts = [_missing(row), _why(row)]
    return "; ".join(filter(None, parts))


def _missing(row: dict[str, Any]) -> str:
    if not row["missing_seeds"]:
        return ""
    lead = f"{_seeds(row['missing_seeds'])} missing: failed or unfinished where the baseline was not"
    spared = not row["diverged_seeds"] and row["ci"][1] is not None and row["ci"][1] < row["margin"]
    return f"{lead}, so it is not called lossless by the others" if spared else lead


def _why(row: dict[str, Any]) -> str:
    if row["diverged_seeds"]:
        return f"diverged at {_seeds(row['diverged_seeds'])} where the baseline did not, which is lossy by definition"
    if row["stand_in"]:
        return _stood_in(row)
    if row["identical"]:
        return ""
    if len(row["differences"]) == 1 and row["aa_floor"] is not None:
        return (
            "one pair alone shows no spread, and too few validations to see its wander: an A/A floor cannot stand in. "
            "At least 1 more seed is needed, or validations more often (trainer.validate_every_steps)"
        )
    if len(row["differences"]) == 1:
        return "one pair alone shows no spread; at least 1 more seed, or an A/A run, is needed to tell"
    low, high = row["ci"]
    if row["verdict"] != "inconclusive" or low is None or high < row["margin"]:
        return ""
    return _plan(row)


def _stood_in(row: dict[str, Any]) -> str:
    if row["stand_in"] == "family":
        text = "one pair: the spread of the other recipes stands in for the one between its seeds"
    elif row["stand_in"] == "floor":
        text = f"one pair: the A/A floor of {_count(row['aa_pairs'], 'pair')} stands in for the spread between seeds"
    else:
        times = (
            f"{STAND_IN_FACTOR:g} times the A/A floor of {_count(row['aa_pairs'], 'pair')}, or the pair's own wander,"
        )
        text = f"one pair, against noise within a seed only: {times} stands in for the spread between seeds"
    return text if row["verdict"] != "inconclusive" else f"{text}; more seeds would measure it"


def _plan(row: dict[str, Any]) -> str:
    """Return how many seeds would decide, for true gaps that are worth planning for: the observed one is noise."""
    if row["more_seeds"] is None and row["seeds_if_no_gap"] is not None:
        told = (
            f"{_count(len(row['differences']), 'seed')} would mostly have told a gap of 0 or of {PLANNED_GAP} margins"
        )
        return f"the gap is likely near the margin: {told}"
    if row["seeds_if_no_gap"] is None:
        few = row["seeds_if_lossy"]
        text = f"more than {MOST_SEEDS} seeds would be needed to decide if the true gap is 0"
        return text if few is None else f"{text}, about {few} if it is {PLANNED_GAP} margins"
    more, in_all = row["more_seeds"], len(row["differences"]) + row["more_seeds"]
    return (
        f"about {_count(more, 'more seed')} ({in_all} in all) would decide if the true gap is 0, "
        f"{row['seeds_if_lossy']} in all if it is {PLANNED_GAP} margins"
    )


def power_statement() -> str:
    """Return what "N more seeds would decide" assumes."""
    return (
        f"'N more seeds would decide': with probability {POWER:.0%} if the true gap is the one named, at the spread "
        "estimated here. A spread from few pairs is itself known to a factor of two or so, and N goes with its square."
    )


def short(number: int | float | None) -> str:
    """Return a count to two or three digits: 6.9M, 1.6M, 768K."""
    if number is None:
        return "unknown"
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _seeds(seeds: list[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
