"""Find the column of the loss and the column of the step or token axis in the tables of logs."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.compare.curves.table import LoggedTable

Kind = Literal["validation", "training"]
Unit = Literal["nats per token", "bits per token", "bits per byte"]

VALIDATION = {"val", "valid", "validation", "eval", "evaluation", "test", "dev", "heldout"}
LOSSES = {"loss", "nll", "ce", "xent", "crossentropy", "bpb"}
AUXILIARY = {
    "scale", "scaler", "aux", "auxiliary", "z", "zloss", "router", "routing", "moe", "balance", "balancing", "mtp",
    "grad", "gradient", "weight", "weights", "min", "max", "std", "var", "count", "smooth", "smoothed", "ema", "avg5",
    "spike", "time", "seconds", "runtime", "kl", "distill", "reg", "l2", "high", "initial", "best", "norm", "epoch",
    "samples", "scaling", "mask", "delta", "improvement",
}  # fmt: skip
"""Words in a column's name that show that it is no language-model loss, or only a minimum or a moving average of it."""
USUAL_LOSSES = (
    "loss", "train loss", "training loss", "lm loss", "ce loss", "cross entropy loss", "train ce loss",
    "global avg loss", "loss metrics global avg loss", "val loss", "valid loss", "validation loss", "eval loss",
    "value",
)  # fmt: skip
PERPLEXITY = {"ppl", "perplexity"}
NOT_COUNTS = {
    "per", "sec", "second", "seconds", "s", "rate", "throughput", "tps", "time", "ms", "batch", "micro", "max",
    "accuracy", "acc", "loss", "entropy", "ratio", "fraction", "percent", "length", "len", "id",
}  # fmt: skip
STEPS = (
    "step", "global step", "train step", "trainer global step", "train global step", "optimizer step", "iteration",
    "iter", "iterations", "steps", "update", "updates", "num updates", "it",
)  # fmt: skip
"""Names of step columns, the surest first."""
FEWEST_POINTS = 3
"""Least number of points of a curve."""
SAME_BATCH = 1.02
"""Largest ratio of two numbers of tokens per step that count as equal: logs count steps from 0 or from 1."""
Axis = Literal["step", "tokens"]


@dataclass(frozen=True)
class LossColumn:
    """The column of a log that is compared: its `name`, its `kind` (training or validation loss) and its `unit`."""

    name: str
    kind: Kind
    unit: Unit

    @property
    def text(self) -> str:
        """The column as text: "column loss (training loss, nats per token)"."""
        return f"column {self.name} ({self.kind} loss, {self.unit})"


def words_of(name: str) -> list[str]:
    """Return the words of a column's name in lower case: "train/lm_loss" -> train, lm, loss; camelCase is split."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return [word for word in re.split(r"[^a-z0-9]+", split.lower()) if word]


def kind_of(name: str) -> Kind:
    """Return "validation" if the column's name is that of a validation loss, else "training"."""
    return "validation" if VALIDATION & set(words_of(name)) else "training"


def unit_of(table: LoggedTable, name: str) -> Unit:
    """Return the unit that the column's name or the log's settings state; "nats per token" if they state none."""
    words, stated = words_of(name), str(table.settings.get("loss_unit", "")).lower()
    joined = " ".join(words)
    if "bpb" in words or "bits per byte" in joined or stated in ("bpb", "bits per byte"):
        return "bits per byte"
    bits = "bits" in words or "bpt" in words or stated in ("bit", "bits", "bits per token")
    return "bits per token" if bits else "nats per token"


def find_loss(table: LoggedTable, metric: str | None) -> LossColumn:
    """Return the column of the loss: `metric` if given, else the only one, preferably a validation loss.

    Raises:
        ConfigError: there is none, there are several, or `metric` is no column of numbers.
    """
    if metric is not None:
        return LossColumn(metric, kind_of(metric), unit_of(table, _checked(table, metric)))
    named_so = [name for name in table.columns if _is_loss(name) and _points(table, name) > 1]
    candidates = [name for name in named_so if _points(table, name) >= FEWEST_POINTS] or named_so
    kept = [name for name in candidates if name not in table.smoothed]
    if candidates and not kept:
        how = table.smoothed[candidates[0]]
        text = (
            f"its only loss, {candidates[0]}, is smoothed by the program ({how}). Log the loss itself, or a validation."
        )
        raise ConfigError(Problem(table.source, text))
    if not kept:
        raise ConfigError(Problem(table.source, _why_no_loss(table)))
    found = _preferred(table, kept)
    if len(found) > 1:
        text = f"has several columns of a {kind_of(found[0])} loss: {', '.join(found)}. Choose one with --metric."
        raise ConfigError(Problem(table.source, text))
    return LossColumn(found[0], kind_of(found[0]), unit_of(table, found[0]))


def _why_no_loss(table: LoggedTable) -> str:
    if mixed := [name for name in table.mixed if _is_loss(name)]:
        return _no_numbers(table, mixed[0])
    if not table.columns:
        return "has no values. Name a log with at least two points."
    if short := [name for name in table.columns if _is_loss(name)]:
        return f"column {short[0]} has one value. Name a log with at least two points."
    named = ", ".join(sorted(table.columns))
    if found := [name for name in table.columns if PERPLEXITY & set(words_of(name))]:
        return f"has a perplexity ({found[0]}), but no loss. Log the loss, the logarithm of it. Columns: {named}."
    return f"has no column of a loss. Columns: {named}. Name one with --metric."


def _no_numbers(table: LoggedTable, name: str) -> str:
    return f"column {name} has values that are no numbers: {table.mixed[name]}. Repair or remove these rows."


def _preferred(table: LoggedTable, names: Sequence[str]) -> list[str]:
    """Return the columns of the preferred sort: validation before training, nats before bits per byte."""
    per_byte = [name for name in names if unit_of(table, name) == "bits per byte"]
    sorts = [
        [name for name in names if kind_of(name) == kind and (name in per_byte) == in_bytes]
        for kind in ("validation", "training")
        for in_bytes in (False, True)
    ]
    return _distinct(table, next(found for found in sorts if found))


def _checked(table: LoggedTable, metric: str) -> str:
    if PERPLEXITY & set(words_of(metric)):
        text = f"is a perplexity in {table.source}, and margins are in nats. Log the loss, the logarithm of it."
        raise ConfigError(Problem("--metric", text, metric))
    if metric in table.columns:
        return metric
    if metric in table.mixed:
        text = f"has values that are no numbers in {table.source}: {table.mixed[metric]}. Repair or remove these rows."
        raise ConfigError(Problem("--metric", text, metric))
    hint = did_you_mean(metric, table.columns)
    raise ConfigError(Problem("--metric", f"{table.source} has no such column.{hint}", metric))


def _is_loss(name: str) -> bool:
    words = words_of(name)
    if " ".join(words) in USUAL_LOSSES:
        return True
    has_loss = bool(LOSSES & set(words)) or {"cross", "entropy"} <= set(words) or "bits" in words
    return has_loss and not (AUXILIARY & set(words)) and not (PERPLEXITY & set(words))


def _points(table: LoggedTable, name: str) -> int:
    return int(np.count_nonzero(~np.isnan(table.columns[name])))


def _distinct(table: LoggedTable, names: Sequence[str]) -> list[str]:
    """Return the names without columns that repeat the values of an earlier one."""
    kept: list[str] = []
    for name in names:
        values = table.columns[name]
        if not any(np.array_equal(values, table.columns[other], equal_nan=True) for other in kept):
            kept.append(name)
    return kept


def token_column(table: LoggedTable) -> str | None:
    """Return the name of the column that counts the tokens seen so far, one per point at least; None without one."""

    def is_count(name: str) -> bool:
        words = set(words_of(name))
        if not words & {"tokens", "token", "ntokens"} or words & NOT_COUNTS:
            return False
        return bool(np.nanmax(table.columns[name]) >= _points(table, name) > 1)

    found = [name for name in table.columns if is_count(name)]
    return min(found, key=lambda name: (-_points(table, name), len(name)), default=None)


def tokens_per_step_of(table: LoggedTable, step: str) -> float | None:
    """Return the tokens per step, from the last row with a count of tokens and a `step`, or else from the settings.

    None if the log states neither.
    """
    if (counted := token_column(table)) is not None:
        both = ~np.isnan(table.columns[counted]) & ~np.isnan(table.columns[step])
        steps, tokens = table.columns[step][both], table.columns[counted][both]
        return float(tokens[-1] / steps[-1]) if len(steps) and steps[-1] > 0 else None
    return stated_tokens_per_step(table)


def stated_tokens_per_step(table: LoggedTable) -> float | None:
    """Return the tokens per step that the log's settings state; None if they do not."""
    stated = table.settings
    found = stated.get("tokens_per_step")
    if found is None and {"global_batch_size", "sequence_length"} <= stated.keys():
        product = [stated["global_batch_size"], stated["sequence_length"]]
        found = product[0] * product[1] if all(isinstance(each, int | float) for each in product) else None
    return float(found) if isinstance(found, int | float) and found > 0 else None


def step_column(table: LoggedTable, loss: str) -> str | None:
    """Return the name of the column of optimizer steps that has most values in the rows of `loss`; None without one."""
    there = ~np.isnan(table.columns[loss])

    def rank(name: str) -> tuple[int, int]:
        words = " ".join(words_of(name))
        covered = int(np.count_nonzero(~np.isnan(table.columns[name][there])))
        plain = name.lstrip().startswith("_")  # W&B's own counter of log calls
        return -covered, len(STEPS) if plain else STEPS.index(words)

    found = [name for name in table.columns if " ".join(words_of(name)) in STEPS and name != loss]
    return min(found, key=rank, default=None)


def axis_of(tables: Iterable[tuple[LoggedTable, LossColumn]], x: str | None, tokens_known: bool) -> Axis | str:
    """Return the axis on which all logs are compared: "step", "tokens" or, as requested by `x`, a column.

    Without a request: steps if all logs have them and pass the same tokens per step, as far as known; else tokens.
    `tokens_known`: --tokens-per-step is given, so tokens follow from steps.

    Raises:
        ConfigError: a log has no such axis.
    """
    tables = list(tables)
    if x is not None and x not in ("step", "tokens"):
        lacking = [table for table, _ in tables if x not in table.columns]
        text = f"{lacking[0].source} has no such column.{did_you_mean(x, lacking[0].columns)}" if lacking else ""
        if lacking:
            raise ConfigError(Problem("--x", text, x))
        return x
    steps = [step_column(table, loss.name) for table, loss in tables]
    counted = [token_column(table) is not None for table, _ in tables]
    has_tokens = all(known or (tokens_known and step is not None) for known, step in zip(counted, steps, strict=True))
    if x is None:
        batches = [tokens_per_step_of(table, step) for (table, _), step in zip(tables, steps, strict=True) if step]
        known = [each for each in batches if each is not None]
        same = max(known, default=1.0) <= SAME_BATCH * min(known, default=1.0)
        x = "step" if all(steps) and (same or not has_tokens) else "tokens" if has_tokens else "step"
    problems = []
    for (table, loss), step, counts in zip(tables, steps, counted, strict=True):
        names = ", ".join(name for name in table.columns if name != loss.name) or "none"
        if x == "step" and step is None:
            broken = [name for name in table.mixed if " ".join(words_of(name)) in STEPS]
            text = f"has no column of steps. Other columns: {names}. Choose the axis with --x COLUMN."
            text = _no_numbers(table, broken[0]) if broken else text
            problems.append(Problem(table.source, text))
        if x == "tokens" and not counts and not (tokens_known and step is not None):
            text = f"has no column of tokens. Other columns: {names}. Give --tokens-per-step N, or use --x step."
            problems.append(Problem(table.source, text))
    if problems:
        raise ConfigError(problems)
    return x
