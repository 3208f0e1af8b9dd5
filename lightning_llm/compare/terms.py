"""Terms of a verdict: margin, confidence, metric, tail and targets; asked for, declared for the sweep, or the usual."""

import math
from dataclasses import dataclass, replace

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.compare.runs.losses import LOSS, TAIL_SHARE
from lightning_llm.compare.time_to_target import NO_TARGETS, Targets
from lightning_llm.config.schema.sweep import read_margin


@dataclass(frozen=True)
class Terms:
    """What a verdict is asked for: `margin` in nats per token, `confidence` of all intervals of a family together.

    `token_margin`: the margin as a share of tokens, 0.02 for 2 %, where it was given so; `margin` is then NaN until it
    is known for a group (`token_margin.in_nats`), and of a verdict the one over its own pairs
    (`VerdictInputs.margin`).
    """

    margin: float = 0.01
    confidence: float = 0.95
    metric: str = "val_loss"
    tail_share: float = TAIL_SHARE
    targets: Targets = NO_TARGETS
    """What time to target is measured to (--target); none by default."""
    all_pairs: bool = False
    """Whether recipes are held against each other, too."""
    token_margin: float | None = None

    @property
    def margin_words(self) -> str:
        """The margin: "0.01", "2 % of tokens (0.0041)"."""
        if self.token_margin is None:
            return f"{self.margin:g}"
        nats = f" ({self.margin:.2g})" if math.isfinite(self.margin) else ""
        return f"{100 * self.token_margin:g} % of tokens{nats}"

    @property
    def margin_and_unit(self) -> str:
        """The margin as it was asked for: "0.01 nats per token", "2 % of tokens"."""
        return self.margin_words if self.token_margin is not None else f"{self.margin:g} {self.unit}"

    @property
    def unit(self) -> str:
        """What `margin` and gaps are in."""
        return "nats per token" if self.metric.removeprefix("eval/").startswith(LOSS) else f"of {self.metric}"


@dataclass(frozen=True)
class LookLevels:
    """What one of several declared looks may use up: `intervals` the confidence of its intervals, `failures` its share
    of the error of the verdict on stability."""

    intervals: float
    failures: float


@dataclass(frozen=True)
class RequestedTerms:
    """The terms that were asked for, None where nothing was; `margin` in nats, or "2%" of tokens."""

    margin: float | str | None = None
    confidence: float | None = None
    metric: str | None = None
    tail: float | None = None
    targets: Targets = NO_TARGETS
    all_pairs: bool = False

    def over(self, terms: Terms) -> Terms:
        """Return `terms`, replaced where something was asked for. Raises ConfigError for an invalid margin."""
        margin, share = (terms.margin, terms.token_margin) if self.margin is None else margin_of(self.margin)
        return replace(
            terms,
            margin=margin,
            token_margin=share,
            targets=self.targets,
            all_pairs=self.all_pairs,
            confidence=terms.confidence if self.confidence is None else self.confidence,
            metric=terms.metric if self.metric is None else self.metric,
            tail_share=terms.tail_share if self.tail is None else self.tail,
        )


def terms_of(asked: RequestedTerms, declared: Terms | None = None) -> Terms:
    """Return the terms of a verdict: those declared for the sweep, or else those asked for.

    Raises:
        ConfigError: with every term that is out of range.
    """
    if declared is not None:
        return replace(declared, targets=asked.targets, all_pairs=asked.all_pairs)
    problems: list[Problem] = []
    terms = replace(asked, margin=None).over(Terms())
    with gathered(problems):
        terms = asked.over(Terms())
    if terms.token_margin is not None and not terms.metric.startswith(LOSS):
        text = f"in tokens is one of a loss, and --metric is {terms.metric}. Give it in its unit."
        problems.append(Problem("--margin", text))
    if not 0.5 <= terms.confidence < 1:
        problems.append(Problem("--confidence", f"is {terms.confidence:g}, must be from 0.5 to below 1, say 0.95."))
    if not 0 <= terms.tail_share < 1:
        problems.append(Problem("--tail", f"is {terms.tail_share:g}, must be from 0 (the last validation) to below 1."))
    if problems:
        raise ConfigError(problems)
    return terms


def margin_of(word: str | float) -> tuple[float, float | None]:
    """Return (nats, None) of "0.01", and (NaN, 0.02) of "2%": a share of tokens, which becomes nats for each family.

    Raises:
        ConfigError: it is neither.
    """
    try:
        return read_margin(word)
    except ValueError as error:
        raise ConfigError(Problem("--margin", f"{error}.")) from error
