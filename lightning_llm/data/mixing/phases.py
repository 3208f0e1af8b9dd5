"""mixture=phases: weights as a piecewise constant function of the sample's number.

The tokens that a source gave in earlier phases are a sum of `Shares.drawn` over their lengths, known from the config
alone. So a source continues in each phase where it stopped, and no window comes twice in an epoch.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.config.schema.base import Fraction, Group, NonNegativeFloat, NonNegativeInt, PositiveInt
from lightning_llm.config.schema.data import MIXTURES, MixtureConfig
from lightning_llm.data.mixing.addressing import MixturePhase, Shares
from lightning_llm.data.mixing.static import weight_problems


class WeightPhase(Group):
    """Weights from some step on. Exactly one phase begins with the run."""

    start: Fraction | None = Field(None, description="share of the run's steps after which it begins")
    start_step: NonNegativeInt | None = Field(None, description="steps after which it begins, in place of start")
    weights: dict[str, NonNegativeFloat] = Field(
        default={}, description="weights of sources in this phase, 0 allowed; one not named keeps its own"
    )

    @property
    def begins_the_run(self) -> bool:
        """Whether it begins at the first step."""
        return not self.start and not self.start_step

    def over(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Return each source's weight in this phase; `weights` are the sources' own."""
        return {source: self.weights.get(source, own) for source, own in weights.items()}


@MIXTURES.register
class PhasedMixture(MixtureConfig):
    """The sources' weights change at steps known in advance."""

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
            yield Problem(f"{key}.phases", f"one must begin with the run (start=0), and {found}.")
        for source in weights:
            if all(phase.weights.get(source) == 0 for phase in self.phases.values()):
                text = "is 0 in every phase. Leave the source out, or only watch it: role=validation."
                yield Problem(f"{key}.phases.{next(iter(self.phases))}.weights.{source}", text)

    def drawn(self, weights: Mapping[str, float]) -> tuple[str, ...]:
        phases = [phase.over(weights) for phase in self.phases.values()]
        return tuple(name for name in weights if any(phase[name] for phase in phases))

    def build(self, weights: Mapping[str, float], step_samples: int, max_steps: int | None) -> Any:
        total = self.total_steps or max_steps
        if total is None and self.follows_max_steps:
            text = "must be given where trainer.max_steps is not known."
            raise ConfigError(Problem("data.mixture.total_steps", text))
        phases = {}
        for name, phase in self.phases.items():
            step = phase.start_step if phase.start is None else round(phase.start * (total or 0))
            phases[name] = (step or 0) * step_samples, phase.over(weights)
        return Phases(phases)


class Phases:
    """A `Mixture` of phases: separate `Shares` from the first sample of each phase on."""

    def __init__(self, phases: Mapping[str, tuple[int, Mapping[str, float]]]):
        """`phases`: by name the first sample, and the weights, all of the same sources; one begins at 0."""
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
        """Return the source of sample `index`, and how many of its samples come before, in all phases."""
        phase = bisect_right(self._starts, index) - 1
        source, ordinal = self._shares[phase].ordinal(index - self._starts[phase])
        return source, self._drawn_before[phase][source] + ordinal

    def drawn(self, total: int) -> list[int]:
        """Return how many of the samples [0, total) each source gives."""
        phase = bisect_right(self._starts, total) - 1
        drawn = self._shares[phase].drawn(total - self._starts[phase])
        return [a + b for a, b in zip(self._drawn_before[phase], drawn, strict=True)]

    def phases(self, total: int) -> Iterator[MixturePhase]:
        """Yield each phase that the samples [0, total) reach, in order."""
        ends = [*self._starts[1:], total]
        for name, first, end, shares in zip(self._phase_names, self._starts, ends, self._shares, strict=True):
            last = min(end, total)
            if first < last:
                yield MixturePhase(name, first, last, tuple(shares.drawn(last - first)))
