"""`sweep`: keys of a sweep in addition to its product of values. They are not part of a run's config."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.config.schema.base import Fraction, Group, PositiveInt
from lightning_llm.config.schema.validation import problem_of

FEWEST_AT_A_LOOK = 2
FEWEST_SIZES, FEWEST_TOKENS = 3, 3
"""Minimum numbers of model sizes and of token counts for a scaling law: such a sweep is a ladder."""

DECIDED, HALVING, OPTUNA = "sweep.until=decided", "sweep.search=halving", "sweep.search=optuna"
READ_BY = {
    **dict.fromkeys(("looks", "max_seeds", "spending", "baseline"), (DECIDED,)),
    **dict.fromkeys(("margin", "confidence"), (DECIDED, HALVING)),
    **dict.fromkeys(("metric", "tail"), (DECIDED, HALVING, OPTUNA)),
    **dict.fromkeys(("trials", "sampler", "search_seed", "pruning", "startup_trials"), (OPTUNA,)),
    "rungs": (HALVING,),
}
"""{key: kinds of sweep that read it}, for keys that not every kind reads."""
MOST_PERCENT = 50.0
"""Largest margin in tokens."""


def _margin(margin: Any) -> float | str:
    """Return a validated margin: a number of nats, or a text such as "2%". Raises ValueError."""
    nats, share = read_margin(margin)
    return nats if share is None else str(margin).strip()


class SweepConfig(Group):
    """`sweep`: further jobs, seeds by declared looks, or a search instead of a product."""

    also: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="further jobs, one line of overrides each: 'precision=bf16 seed=0,1'"
    )
    until: Literal["decided"] | None = Field(
        None, description="decided: add seeds by `looks` until each verdict is decided; null: only the given seeds"
    )
    looks: Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=1, max_length=100)] = Field(
        (3, 4, 5, 6, 8, 10), description="until=decided: numbers of seeds at which verdicts are computed"
    )
    max_seeds: PositiveInt | None = Field(
        None, description="until=decided: budget of seeds, the last look; null: the last of `looks`"
    )
    spending: Literal["linear", "pocock", "obrien_fleming"] = Field(
        "linear", description="error spending over looks: linear in seeds, more on early looks, more on late looks"
    )
    margin: Annotated[float | str, BeforeValidator(_margin)] = Field(
        0.01,
        description="largest gap that counts as lossless, in nats per token or units of `metric`; 2%: extra tokens "
        "allowed, which needs the baseline at two other token counts",
    )
    confidence: float = Field(0.95, ge=0.5, lt=1, description="joint confidence of all intervals of all looks")
    metric: str = Field("val_loss", description="validation metric, as `compare --metric`")
    tail: Fraction = Field(0.1, lt=1, description="final fraction of steps to average over, as `compare --tail`")
    baseline: str | None = Field(
        None, description="baseline of the comparison, as `compare --baseline`; null: the default one"
    )

    search: Literal["optuna", "halving"] | None = Field(
        None, description="optuna: search over intervals and choices; halving: recipes are dropped at rungs"
    )
    trials: PositiveInt = Field(20, description="search=optuna: number of trials, including pruned ones")
    sampler: Literal["tpe", "random", "gp"] = Field("tpe", description="search=optuna: Optuna's sampler")
    search_seed: int = Field(0, ge=0, lt=2**32, description="search=optuna: seed of the sampler")
    pruning: Literal["median", "none"] = Field(
        "median", description="search=optuna: median: end trials with a paired gap above the median of earlier ones"
    )
    startup_trials: PositiveInt = Field(4, description="search=optuna: number of complete trials before any is pruned")
    rungs: Annotated[tuple[Fraction, ...], Field(strict=False, min_length=1)] = Field(
        (0.25, 0.5), description="search=halving: fractions of the steps at which recipes may be dropped"
    )

    @model_validator(mode="after")
    def _looks_ascend(self) -> Self:
        if list(self.looks) != sorted(set(self.looks)):
            raise ValueError(f"looks={list(self.looks)}: must ascend without duplicates")
        if self.looks[0] < FEWEST_AT_A_LOOK:
            raise ValueError(f"looks must begin at {FEWEST_AT_A_LOOK} seeds or more, because one pair has no spread")
        if self.max_seeds is not None and self.max_seeds < FEWEST_AT_A_LOOK:
            raise ValueError(
                f"max_seeds={self.max_seeds}: must be at least {FEWEST_AT_A_LOOK}, the first possible look"
            )
        return self

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.until is not None and self.search is not None:
            raise ValueError("until and search exclude each other, because a search has its own end")
        if list(self.rungs) != sorted(set(self.rungs)) or not self.rungs[0] > 0 or not self.rungs[-1] < 1:
            raise ValueError(f"rungs={list(self.rungs)}: must ascend, each above 0 and below 1")
        if self.search == "halving" and isinstance(self.margin, str):
            raise ValueError(
                f"margin={self.margin}: must be in nats with search=halving, which decides during training"
            )
        return self

    @property
    def kind(self) -> str | None:
        """The override that makes it more than a product of values, e.g. "sweep.search=optuna"; None for a product."""
        if self.search is not None:
            return f"sweep.search={self.search}"
        return None if self.until is None else f"sweep.until={self.until}"

    @property
    def margin_nats(self) -> float:
        """The margin in nats; NaN if it is in tokens."""
        return read_margin(self.margin)[0]

    @property
    def looks_within_budget(self) -> tuple[int, ...]:
        """The declared looks (numbers of seeds) up to the budget `max_seeds`, the last one at the budget."""
        if self.max_seeds is None:
            return self.looks
        return (*(look for look in self.looks if look < self.max_seeds), self.max_seeds)


def read_sweep_keys(values: Any) -> SweepConfig:
    """Return `values`, the mapping below `sweep`, as validated keys. Raises ConfigError with all problems."""
    try:
        keys = SweepConfig.model_validate(values)
    except ValidationError as error:
        details = error.errors()
        wrong = {each["loc"][0] for each in details if len(each["loc"]) > 1}  # pydantic counts only the valid items
        reported = [each for each in details if each["type"] != "too_short" or each["loc"][0] not in wrong]
        raise ConfigError([_problem(each) for each in reported]) from error
    if problems := [*_unread(keys), *_never_pruned(keys)]:
        raise ConfigError(problems)
    return keys


def _unread(keys: SweepConfig) -> Iterator[Problem]:
    """Yield each key that is set, in a preset or on the command line, but not read by this kind of sweep."""
    for key, kinds in READ_BY.items():
        if key not in keys.model_fields_set or getattr(keys, key) is None or keys.kind in kinds:
            continue
        here = f"this sweep has {keys.kind}" if keys.kind else "this sweep has neither looks nor a search"
        yield Problem(f"sweep.{key}", f"is only read with {' or '.join(kinds)}, and {here}. Omit it.")


def _never_pruned(keys: SweepConfig) -> Iterator[Problem]:
    """Yield a given number of startup trials that leaves no trial to prune."""
    if keys.search != "optuna" or keys.pruning == "none" or keys.startup_trials < keys.trials:
        return
    if "startup_trials" not in keys.model_fields_set:  # the default; more trials may follow
        return
    text = (
        f"must be below sweep.trials={keys.trials}, or no trial can be pruned. Lower it, raise trials, or set "
        "sweep.pruning=none."
    )
    yield Problem("sweep.startup_trials", text, keys.startup_trials)


def _problem(details: Any) -> Problem:
    location = ["sweep", *map(str, details["loc"])]
    key = ".".join(location)
    if details["type"] == "extra_forbidden":
        return Problem(key, f"unknown key.{did_you_mean(location[-1], SweepConfig.model_fields)}")
    if "also" in location:
        return Problem(key, "must be a list of lines like 'precision=bf16 seed=0,1'.")
    return problem_of({**details, "loc": location})


def read_margin(margin: str | float) -> tuple[float, float | None]:
    """Return a margin as (nats, share of extra tokens): (0.01, None) of 0.01 or "0.01", (NaN, 0.02) of "2%".

    Raises:
        ValueError: it is neither.
    """
    text = str(margin).strip()
    in_tokens = text.endswith("%")
    try:
        value = math.nan if isinstance(margin, bool) else float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        problem = "must be above 0, in nats per token (0.01) or extra tokens (2%)"
        raise ValueError(problem)
    if in_tokens and value > MOST_PERCENT:
        problem = f"must be at most {MOST_PERCENT:g}% in tokens, because half the tokens show no more"
        raise ValueError(problem)
    return (math.nan, value / 100) if in_tokens else (value, None)
