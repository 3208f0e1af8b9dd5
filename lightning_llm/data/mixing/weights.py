"""Mixtures by weight: `static` (constant weights) and `phases` (weights change at known steps); `data.max_tokens`.

The number of samples that a source gave in earlier phases is a sum of `Shares.drawn` over their lengths, known from the
config alone. So a source continues in each phase where it stopped, and no window occurs twice in an epoch.
`data.max_tokens` limits the windows of each source in proportion to its weight, without reading documents.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.config.schema.base import Fraction, Group, NonNegativeFloat, NonNegativeInt, PositiveInt
from lightning_llm.config.schema.data import MIXTURES, DataConfig, MixtureConfig
from lightning_llm.data.mixing.addressing import SMALLEST_SHARE, MixturePhase, Shares, largest_remainder

KEY = "data.max_tokens"


@MIXTURES.register
class StaticMixture(MixtureConfig):
    """Mixture with constant weights: each source's share of the training tokens is its share of the weights."""

    kind: Literal["static"] = "static"

    def problems(self, key: str, weights: Mapping[str, float]) -> Iterator[Problem]:
        if not any(weights.values()):
            yield Problem(
                f"data.sources.{next(iter(weights))}.weight",
                "is 0, like all others. Give at least one source a weight above 0.",
            )
        yield from weight_problems(weights, {name: f"data.sources.{name}.weight" for name in weights})

    def drawn(self, weights: Mapping[str, float]) -> tuple[str, ...]:
        return tuple(name for name, weight in weights.items() if weight)

    def identity(self) -> None:
        return None

    def build(self, weights: Mapping[str, float], step_samples: int, max_steps: int | None) -> Any:
        return Shares(weights)


def weight_problems(weights: Mapping[str, float], keys: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each weight that is above 0, but below the smallest share that an order can represent.

    `weights` and `keys` (the config key of each weight) are by source name.
    """
    total = sum(weights.values())
    for name, weight in weights.items():
        if 0 < weight < SMALLEST_SHARE * total:
            text = (
                f"{weight} is a share of {weight / total:.1e} of the tokens; the smallest possible is "
                f"{SMALLEST_SHARE:.0e}. Raise it, or remove the source."
            )
            yield Problem(keys[name], text)


class WeightPhase(Group):
    """Weights of the sources from a step on. Exactly one phase begins with the run."""

    start: Fraction | None = Field(None, description="share of the run's steps after which it begins")
    start_step: NonNegativeInt | None = Field(None, description="steps after which it begins, in place of start")
    weights: dict[str, NonNegativeFloat] = Field(
        default={}, description="weights of sources in this phase, 0 allowed; one not named keeps its own"
    )

    @property
    def begins_the_run(self) -> bool:
        """Whether the phase begins at the first step."""
        return not self.start and not self.start_step

    def over(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return {source: weight in this phase}; `weights`: the sources' own, used for sources it does not name."""
        return {source: self.weights.get(source, own) for source, own in weights.items()}


@MIXTURES.register
class PhasedMixture(MixtureConfig):
    """Mixture with weights that change at steps known in advance."""

    kind: Literal["phases"] = "phases"
    phases: Annotated[dict[str, WeightPhase], Field(min_length=1)] = Field(
        description="by a name of your choice: start or start_step, and weights"
    )
    total_steps: PositiveInt | None = Field(
        None, description="steps of the run that each start is a share of; null: trainer.max_steps"
    )

    @property
    def follows_max_steps(self) -> bool:
        """Whether the first steps of the phases depend on the length of the run."""
        return self.total_steps is None and any(phase.start for phase in self.phases.values())

    def problems(self, key: str, weights: Mapping[str, float]) -> Iterator[Problem]:
        for name, phase in self.phases.items():
            here = f"{key}.phases.{name}"
            if phase.start is not None and phase.start_step is not None:
                yield Problem(f"{here}.start_step", "is given in addition to start. Give one of them.")
            for source in phase.weights.keys() - weights.keys():
                text = f"there is no source {source!r} that is trained on.{did_you_mean(source, weights)}"
                yield Problem(f"{here}.weights.{source}", text)
            chosen = phase.over(weights)
            if not any(chosen.values()):
                yield Problem(f"{here}.weights", "are all 0: a phase needs at least one source.")
            keys = {
                source: f"{here}.weights.{source}" if source in phase.weights else f"data.sources.{source}.weight"
                for source in weights
            }
            yield from weight_problems(chosen, keys)
        first = [name for name, phase in self.phases.items() if phase.begins_the_run]
        if len(first) != 1:
            found = f"{', '.join(first)} do" if first else "none does"
            yield Problem(f"{key}.phases", f"exactly one must begin with the run, and {found}. Set its start=0.")
        for source in weights:
            if all(phase.weights.get(source) == 0 for phase in self.phases.values()):
                text = "is 0 in every phase. Remove the source, or only validate on it: role=validation."
                yield Problem(f"{key}.phases.{next(iter(self.phases))}.weights.{source}", text)

    def drawn(self, weights: Mapping[str, float]) -> tuple[str, ...]:
        phases = [phase.over(weights) for phase in self.phases.values()]
        return tuple(name for name in weights if any(phase[name] for phase in phases))

    def build(self, weights: Mapping[str, float], step_samples: int, max_steps: int | None) -> Any:
        total = self.total_steps or max_steps
        if total is None and self.follows_max_steps:
            text = "a value must be given, because trainer.max_steps is not known here."
            raise ConfigError(Problem("data.mixture.total_steps", text))
        phases = {}
        for name, phase in self.phases.items():
            step = phase.start_step if phase.start is None else round(phase.start * (total or 0))
            phases[name] = (step or 0) * step_samples, phase.over(weights)
        return Phases(phases)


class Phases:
    """`Mixture` of several phases, each with its own weights from its first sample on."""

    def __init__(self, phases: Mapping[str, tuple[int, Mapping[str, float]]]):
        """`phases`: {name: (first sample, weights)}, with weights of the same sources in all; one begins at 0."""
        ordered = sorted(phases.items(), key=lambda each: each[1][0])
        self._phase_names = [name for name, _ in ordered]
        self._starts = [first for _, (first, _) in ordered]
        self._shares = [Shares(weights) for _, (_, weights) in ordered]
        self.names = self._shares[0].names
        self._drawn_before = [[0] * len(self.names)]
        for shares, first, last in zip(self._shares, self._starts, self._starts[1:], strict=False):
            drawn = shares.drawn(last - first)
            self._drawn_before.append([a + b for a, b in zip(self._drawn_before[-1], drawn, strict=True)])

    def ordinal(self, index: int) -> tuple[int, int]:
        """Return (source of sample `index`, number of earlier samples of that source in all phases)."""
        phase = bisect_right(self._starts, index) - 1
        source, ordinal = self._shares[phase].ordinal(index - self._starts[phase])
        return source, self._drawn_before[phase][source] + ordinal

    def drawn(self, total: int) -> list[int]:
        """Return the number of samples from each source among samples [0, total)."""
        phase = bisect_right(self._starts, total) - 1
        drawn = self._shares[phase].drawn(total - self._starts[phase])
        return [a + b for a, b in zip(self._drawn_before[phase], drawn, strict=True)]

    def phases(self, total: int) -> Iterator[MixturePhase]:
        """Yield the phases that samples [0, total) reach, in order."""
        ends = [*self._starts[1:], total]
        for name, first, end, shares in zip(self._phase_names, self._starts, ends, self._shares, strict=True):
            last = min(end, total)
            if first < last:
                yield MixturePhase(name, first, last, tuple(shares.drawn(last - first)))


def window_limits(config: DataConfig) -> dict[str, int] | None:
    """Return {source: maximum number of windows} that `data.max_tokens` allows; None if the key is not set.

    Only sources that are trained on are limited, each to at least 1 window. Limits are proportional to the weights, so
    that all sources get the same number of epochs.
    """
    if config.max_tokens is None:
        return None
    weights = {name: config.trained_weights[name] for name in config.drawn}
    counts = largest_remainder(list(weights.values()), config.max_tokens // config.sequence_length)
    return {name: max(1, count) for name, count in zip(weights, counts, strict=True)}


def bound_problems(config: DataConfig) -> Iterator[Problem]:
    """Yield problems of `data.max_tokens` (it cannot be divided) and `data.epochs` (their length is unknown)."""
    if config.max_tokens is None:
        if config.epochs is not None:
            text = f"is {config.epochs:g}, but the length of an epoch is unknown before data is read: set {KEY}."
            yield Problem("data.epochs", text)
        return
    if config.chosen_mixture.chooses_documents:
        text = (
            f"limits sequences in stored order, but data.mixture.kind={config.chosen_mixture.kind} chooses documents. "
        )
        yield Problem(KEY, f"{text}Remove one of them.")
    drawn, length = config.drawn, config.sequence_length
    for name in drawn:
        if not config.trained_weights[name]:
            text = f"is 0, and {KEY} is divided by weight. Give the source a weight here, and 0 in the phase."
            yield Problem(f"data.sources.{name}.weight", text)
    if config.max_tokens < length * len(drawn):
        text = f"is {config.max_tokens:,}, but one sequence per source takes {length * len(drawn):,}. Raise it."
        yield Problem(KEY, text)


def limit_problem(name: str, limit: int, available_tokens: int, config: DataConfig) -> Problem | None:
    """Return a problem if a source has fewer windows than its `limit`: it would be repeated more often than others."""
    length = config.sequence_length
    if max(0, available_tokens - 1) // length >= limit:
        return None
    text = (
        f"{config.max_tokens:,} needs {limit * length + 1:,} tokens of source {name!r} by its weight, which has "
        f"{available_tokens:,}. Lower it, or the source's weight."
    )
    return Problem(KEY, text)
