"""Data ablation by merging: average models of one part of the data each, to rank sets of parts without training runs.

Na et al. 2024 (arXiv 2410.15661): one model is trained per part of the data, all parts of one size and all models from
one start. For each set of parts the weights of their models are averaged. The loss of that average ranks the sets; it
is not the loss of a model trained on the set. So one run per part is enough for every set of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.data.corpus import Corpus
from lightning_llm.data.opening import open_corpus
from lightning_llm.evaluate.validation import TrainedModel, validation_losses
from lightning_llm.evaluate.weights import AverageWeights, check_members
from lightning_llm.model.weights.load import InitialWeights
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.degrees import Degrees
from lightning_llm.run.subject import Subject, find_subject, verified_weights
from lightning_llm.tracking.files import write_json
from lightning_llm.tracking.run_state import state_of

FILE = "merge.json"
MOST_PARTS = 12
Losses = dict[str, float]
Parts = tuple[str, ...]
CONFIDENCE = 0.95
FEWEST = 4
"""Least number of points for an interval of the correlation."""


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman's `rho` over `count` points with its 95 % interval [`low`, `high`], [-1, 1] for too few points."""

    rho: float
    low: float
    high: float
    count: int

    @classmethod
    def from_values(cls, one: Sequence[float], other: Sequence[float]) -> "RankCorrelation":
        """Return the rank correlation of two equally long lists; NaN for fewer than 2 points or a constant list.

        The interval is Fisher's transform with the variance of D. G. Bonett and T. A. Wright (Psychometrika 65 (2000)
        23): `(1 + rho^2 / 2) / (count - 3)`. For a perfect order, the interval is that of the order with two neighbors
        exchanged, extended to the end: a few points that happen to agree are not certainty.
        """
        count = len(one)
        if count < 2 or np.ptp(one) == 0 or np.ptp(other) == 0:
            return cls(math.nan, -1.0, 1.0, count)
        rho = float(stats.spearmanr(one, other).statistic)
        if count < FEWEST:
            return cls(rho, -1.0, 1.0, count)
        nearest = 1 - 12 / (count * (count**2 - 1))  # to a perfect order
        inner = max(-nearest, min(nearest, rho))
        half = float(stats.norm.ppf(0.5 + CONFIDENCE / 2)) * math.sqrt((1 + inner**2 / 2) / (count - 3))
        low, high = (math.tanh(math.atanh(inner) + side * half) for side in (-1, 1))
        return cls(rho, -1.0 if rho < inner else low, 1.0 if rho > inner else high, count)

    def text(self) -> str:
        """Return the correlation and its interval as text: "+0.83 [+0.41, +0.96]"."""
        return f"{self.rho:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


@dataclass(frozen=True)
class Candidate:
    """A set of `parts` of the data at one `seed`.

    `proxy`: losses of the average of the models of these parts; `true`: losses of a run trained on the whole set, None
    without such a run. Both {metric: nats per token}.
    """

    parts: Parts
    seed: int
    proxy: Losses
    true: Losses | None

    def as_data(self) -> dict[str, Any]:
        """Return the candidate as JSON data."""
        return {"parts": list(self.parts), "seed": self.seed, "proxy": self.proxy, "true": self.true}


@dataclass(frozen=True)
class Merge:
    """Result of an ablation: all `candidates`, and `units`: {(seed, part): losses of the run on that part alone}.

    `file`: the `merge.json` that has the result.
    """

    units: dict[tuple[int, str], Losses]
    candidates: list[Candidate]
    file: Path = field(default=Path())

    @property
    def metrics(self) -> list[str]:
        """Names of the losses: over all sources together, and of each source."""
        return [name for name in next(iter(self.units.values())) if name.startswith("val_loss") and "high" not in name]

    def correlation(self, metric: str) -> RankCorrelation:
        """Return the rank correlation of the proxies' `metric` with that of trained runs, over all sets with a run."""
        known = [each for each in self.candidates if each.true is not None]
        true = [each.true[metric] for each in known if each.true is not None]
        return RankCorrelation.from_values([each.proxy[metric] for each in known], true)

    @property
    def mean_of_sources(self) -> float:
        """The mean of the rank correlations of the validation sources; NaN without separate sources."""
        found = [self.correlation(metric).rho for metric in self.metrics if "/" in metric]
        return sum(found) / len(found) if found else math.nan

    def as_data(self) -> dict[str, Any]:
        """Return the content of `merge.json`."""
        known = sum(each.true is not None for each in self.candidates)
        units = [{"part": part, "seed": seed, "loss": losses} for (seed, part), losses in self.units.items()]
        correlations = {metric: vars(self.correlation(metric)) for metric in self.metrics} if known > 1 else {}
        return {
            "units": units,
            "candidates": [each.as_data() for each in self.candidates],
            "spearman": correlations,
            "spearman_mean_of_sources": self.mean_of_sources if known > 1 else None,
        }


def merge(folder: Path, device: torch.device, progress: Callable[[str], None] = lambda text: None) -> Merge:
    """Score the average of the models of every set of parts in the sweep `folder`; write and return the result.

    Runs on one source are the units (one model per part). Runs on several sources of equal weight are the reference for
    the averages. All are scored here, on the validation data of the first run. The result is written to `merge.json`.

    Raises:
        ConfigError: there are fewer than two runs on one source, runs are unfinished, or runs differ in their model,
            tokenizer or validation data.
    """
    runs = _runs(folder.expanduser().absolute())
    subjects = list(runs.values())
    check_members(subjects, same_shape=True)
    first = subjects[0]
    data, model, steps = first.config.data, first.config.model, first.config.trainer.max_steps
    corpus = open_corpus(data, first.config.seed, model.vocab_size, steps)
    _check_scored(runs, corpus)
    sets = _sets(runs)
    numbers = count(1)

    def score(*models: Subject) -> Losses:
        progress(f"{next(numbers)} models scored")
        return _average_losses(models, corpus, device)

    units = {(seed, parts[0]): score(each) for (seed, parts), each in runs.items() if len(parts) == 1}
    candidates = []
    for seed, parts in sets:
        proxy = score(*(runs[seed, (part,)] for part in parts))
        trained = runs.get((seed, parts))
        candidates.append(Candidate(parts, seed, proxy, None if trained is None else score(trained)))
    found = Merge(units, candidates, folder.expanduser().absolute() / FILE)
    write_json(found.file, found.as_data())
    return found


def _average_losses(subjects: Sequence[Subject], corpus: Corpus, device: torch.device) -> Losses:
    """Return the validation losses of the average of models."""
    first = subjects[0]
    weights = [InitialWeights(verified_weights(each), each.config.model) for each in subjects]
    model = TrainedModel.from_subject(first, AverageWeights(weights), Layout(first.config.parallel, Degrees()), device)
    return validation_losses([model], first, corpus, device)


def _runs(folder: Path) -> dict[tuple[int, Parts], Subject]:
    """Return the finished runs below `folder` by seed and parts, the parts in the order of the sources."""
    found: dict[tuple[int, Parts], Subject] = {}
    problems: list[Problem] = []
    of_parts: list[Problem] = []
    for file in sorted(folder.glob("*/config.yaml"), key=lambda each: (len(each.parent.name), each.parent.name)):
        if state_of(file.parent) != "finished":
            problems.append(Problem(str(file.parent), "is not finished. Start the sweep again, or remove it."))
            continue
        subject = find_subject(file.parent, [], None, needs_data=False)
        weights = subject.config.data.trained_weights
        parts = tuple(subject.config.data.drawn)
        key = subject.config.seed, parts
        if len({weights[part] for part in parts}) > 1:
            text = (
                "has sources of unlike weights, but all parts must be of one size. Give its sources equal weights, and "
                "split a larger part into several."
            )
            of_parts.append(Problem(str(file.parent), text))
        elif key in found:
            of_parts.append(
                Problem(str(file.parent), f"has the same parts and seed as {found[key].folder}. Remove one of them.")
            )
        found.setdefault(key, subject)
    singles = [parts for _, parts in found if len(parts) == 1]
    if len(singles) < 2 and (found or not problems):  # then it is no such sweep, or its runs are not finished
        of_parts = []
        text = f"has {len(singles)} run{'s' * (len(singles) != 1)} on one source of data, and a set needs at least two."
        problems.append(Problem(str(folder), f"{text} Run train -m recipe=ablate/merge, and name its folder."))
    if len(set(singles)) > MOST_PARTS:
        count = len(set(singles))
        text = (
            f"has runs on {count} parts, which make {2**count:,} sets. Name a folder with {MOST_PARTS} parts or fewer."
        )
        problems.append(Problem(str(folder), text))
    if problems or of_parts:
        raise ConfigError([*of_parts, *problems])
    return found


def _sets(runs: Mapping[tuple[int, Parts], Subject]) -> list[tuple[int, Parts]]:
    """Return all sets of the units of each seed, a set's parts in the order of the sources.

    Raises:
        ConfigError: a run is on several parts that are no such set, so that there is no proxy to hold against it.
    """
    order = list(dict.fromkeys(part for each in runs.values() for part in each.config.data.sources))
    found = []
    for seed in dict.fromkeys(seed for seed, parts in runs if len(parts) == 1):
        names = sorted((parts[0] for its, parts in runs if its == seed and len(parts) == 1), key=order.index)
        found += [(seed, parts) for size in range(2, len(names) + 1) for parts in combinations(names, size)]
    text = (
        "was trained on {}, but with seed {} some of these sources have no separate run, or runs list the sources in "
        "another order. Train the missing runs, list the sources of all runs in one order, or remove this run."
    )
    problems = [
        Problem(str(each.folder), text.format(", ".join(parts), seed))
        for (seed, parts), each in runs.items()
        if len(parts) > 1 and (seed, parts) not in found
    ]
    if problems:
        raise ConfigError(problems)
    return found


def _check_scored(runs: Mapping[tuple[int, Parts], Subject], corpus: Corpus) -> None:
    """Raise ConfigError where a run's own validation was of other sequences, so that its parts are other documents."""
    problems = []
    for each in runs.values():
        own = each.config.data
        opened = open_corpus(own, each.config.seed, each.config.model.vocab_size, each.config.trainer.max_steps)
        if opened.validation_fingerprint != corpus.validation_fingerprint:
            text = "was validated on other sequences. Give all runs the same sources and data.validation.weights."
            problems.append(Problem(str(each.folder), text))
    if problems:
        raise ConfigError(problems)
