"""Terms of a verdict: margin, confidence, metric and other choices; requested, declared for the sweep, or default."""

import math
from dataclasses import dataclass, replace

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.compare.runs.losses import LOSS, TAIL_SHARE
from lightning_llm.compare.time_to_target import NO_TARGETS, Targets
from lightning_llm.config.schema.sweep import read_margin


@dataclass(frozen=True)
class Terms:
    """Terms of a verdict: the `margin` in nats per token, and the joint `confidence` of all intervals of a group.

    `metric`: the judged validation metric; `tail_share`: share of the last steps over which it is averaged.
    `token_margin`: the margin as a share of tokens, 0.02 for 2 %, if it was given so; `margin` is then NaN until it is
    known for a group of runs (`token_margin.in_nats`) or a verdict (`VerdictInputs.margin`).
    """

    margin: float = 0.01
    confidence: float = 0.95
    metric: str = "val_loss"
    tail_share: float = TAIL_SHARE
    targets: Targets = NO_TARGETS
    """Values whose first time is compared, too (--target); none by default."""
    all_pairs: bool = False
    """True if recipes are also compared with each other."""
    token_margin: float | None = None
    next_confidence: float | None = None
    """Confidence of the next look of a series with an error budget, for which seeds are planned; None: the same."""
    measured_in: str | None = None
    """The unit of a metric that another trainer logged; None for runs of this program."""

    @property
    def margin_text(self) -> str:
        """The margin as text: "0.01", "2 % of tokens (0.0041)"."""
        if self.token_margin is None:
            return f"{self.margin:g}"
        nats = f" ({self.margin:.2g})" if math.isfinite(self.margin) else ""
        return f"{100 * self.token_margin:g} % of tokens{nats}"

    @property
    def margin_and_unit(self) -> str:
        """The requested margin with its unit: "0.01 nats per token", "2 % of tokens"."""
        return self.margin_text if self.token_margin is not None else f"{self.margin:g} {self.unit}"

    @property
    def unit(self) -> str:
        """The unit of `margin` and gaps."""
        if self.measured_in is not None:
            return self.measured_in
        return "nats per token" if self.metric.removeprefix("eval/").startswith(LOSS) else f"of {self.metric}"


@dataclass(frozen=True)
class LookLevels:
    """Error rates of one declared look.

    `intervals`: confidence of its intervals; `failures`: its share of the error of the verdict on stability.
    """

    intervals: float
    failures: float


@dataclass(frozen=True)
class RequestedTerms:
    """The terms that the user requested, None if not given. `margin`: in nats, or "2%" of tokens."""

    margin: float | str | None = None
    confidence: float | None = None
    metric: str | None = None
    tail: float | None = None
    targets: Targets = NO_TARGETS
    all_pairs: bool = False

    def over(self, terms: Terms) -> Terms:
        """Return `terms` with the requested values in place of theirs. Raises ConfigError for an invalid margin."""
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
    """Return the terms of a verdict: those declared for the sweep, or else those requested.

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
        text = f"in tokens requires a loss as metric, but --metric is {terms.metric}. Give the margin in its unit."
        problems.append(Problem("--margin", text))
    if not 0.5 <= terms.confidence < 1:
        problems.append(Problem("--confidence", "must be from 0.5 to below 1, e.g. 0.95.", f"{terms.confidence:g}"))
    if not 0 <= terms.tail_share < 1:
        problems.append(Problem("--tail", "must be from 0 (the last validation) to below 1.", f"{terms.tail_share:g}"))
    if problems:
        raise ConfigError(problems)
    return terms


def margin_of(word: str | float) -> tuple[float, float | None]:
    """Return (nats, None) for "0.01", and (NaN, 0.02) for "2%", a share of tokens that is converted to nats per group.

    Raises:
        ConfigError: it is neither.
    """
    try:
        return read_margin(word)
    except ValueError as error:
        raise ConfigError(Problem("--margin", f"{error}.", word)) from error
