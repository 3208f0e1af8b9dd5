"""Targets of `--target`: the value of the metric that a run has to reach, for all settings or for each its own."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.tracking.reading import Run

KEY = "--target"


@dataclass(frozen=True)
class Targets:
    """`for_all`: of every setting that `by_setting`, {a setting's words: its own}, does not name; None: none."""

    for_all: float | None = None
    by_setting: tuple[tuple[str, float], ...] = ()

    def of(self, setting: str) -> float | None:
        """Return the target of the setting called `setting`."""
        return dict(self.by_setting).get(setting, self.for_all)

    @property
    def words(self) -> list[str]:
        """The targets as `read_targets` reads them."""
        own = [f"{setting}:{value!r}" for setting, value in self.by_setting]
        return own if self.for_all is None else [repr(self.for_all), *own]

    def check(self, settings: Sequence[str]) -> list[Problem]:
        """Return which names are of no setting, and which settings have no target."""
        found = []
        alone = list(settings) in ([""], ["all"])
        for name, value in self.by_setting:
            if name not in settings and alone:
                text = f"'{name}:{value:g}' names a setting, and these runs are of one, which needs no name"
                found.append(Problem(KEY, f"{text}: --target {value:g}."))
            elif name not in settings:
                known = ", ".join(f"'{each}'" for each in settings)
                text = f"'{name}' is no setting of these runs, which are {known}.{did_you_mean(name, settings)}"
                found.append(Problem(KEY, text))
        if alone:
            nothing = (
                [] if found or self.of(settings[0]) is not None else [Problem(KEY, "none is given: --target VALUE.")]
            )
            return [*found, *nothing]
        missing = [each for each in settings if self.of(each) is None]
        return [*found, *(Problem(KEY, f"none is given for '{each}': --target '{each}:VALUE'.") for each in missing)]


NO_TARGETS = Targets()


def read_targets(words: Sequence[str]) -> Targets:
    """Return what "4.4" and "model=llama_tiny:4.4" ask for; a later one for the same takes its place.

    Raises:
        ConfigError: with all that are no targets.
    """
    problems, for_all, own = [], None, {}
    for word in words:
        setting, _, number = word.rpartition(":")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            text = f"is '{word}', must be a number above 0, 4.4, or that of one setting, model=llama_tiny:4.4."
            problems.append(Problem(KEY, text))
        elif setting:
            own[setting.strip()] = value
        else:
            for_all = value
    if problems:
        raise ConfigError(problems)
    return Targets(for_all, tuple(sorted(own.items())))


@dataclass(frozen=True)
class Reached:
    """When a run first was at its target: optimizer `steps`, `tokens`, `seconds` of training, validations left out.

    Infinite where it never was. `ended_tokens`: its last validation's, up to where one that missed was watched.
    """

    steps: float
    tokens: float
    seconds: float
    ended_tokens: float


def reached(run: Run, metric: str, target: float, *, higher_is_better: bool) -> Reached:
    """Return the first validation of `run` at which `metric` was at `target` or better: nothing is interpolated."""
    values = run.validations.get(metric, {})
    ended = float(max((run.tokens.get(step, 0) for step in values), default=0))
    for step in sorted(values):
        at = values[step]
        if math.isfinite(at) and (at >= target if higher_is_better else at <= target):
            return Reached(step, run.tokens.get(step, math.nan), run.train_seconds.get(step, math.nan), ended)
    return Reached(math.inf, math.inf, math.inf, ended)
