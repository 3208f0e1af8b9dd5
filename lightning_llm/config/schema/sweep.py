"""`sweep`: what a sweep does beside its product of values. No single run reads it, or has it in its config."""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.config.schema.base import Fraction, Group, PositiveInt
from lightning_llm.config.schema.messages import problem_of

FEWEST_AT_A_LOOK = 2
FEWEST_SIZES, FEWEST_TOKENS = 3, 3
"""Model sizes, and numbers of tokens, that a law over both takes: of so many a sweep is a ladder."""

DECIDED, HALVING, OPTUNA = "sweep.until=decided", "sweep.search=halving", "sweep.search=optuna"
READ_BY = {
    **dict.fromkeys(("looks", "max_seeds", "spending", "baseline"), (DECIDED,)),
    **dict.fromkeys(("margin", "confidence"), (DECIDED, HALVING)),
    **dict.fromkeys(("metric", "tail"), (DECIDED, HALVING, OPTUNA)),
    **dict.fromkeys(("trials", "sampler", "search_seed", "pruning", "startup_trials"), (OPTUNA,)),
    "rungs": (HALVING,),
}
"""The kinds of sweep that read a key, of those that not every kind does."""
MOST_PERCENT = 50.0
"""Of a margin in tokens."""


def _margin(word: Any) -> float | str:
    """Return a margin as it is kept: a number of nats, or "2%". Raises ValueError."""
    nats, share = read_margin(word)
    return nats if share is None else str(word).strip()


class SweepConfig(Group):
    """`sweep`: further jobs, seeds by declared looks, a search in place of a product."""

    also: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="further jobs, a line of overrides each: 'precision=bf16 seed=0,1'"
    )
    until: Literal["decided"] | None = Field(
        None, description="decided: seeds by `looks`, until each verdict is decided; null: the seeds that are given"
    )
    looks: Annotated[tuple[PositiveInt, ...], Field(strict=False, min_length=1, max_length=100)] = Field(
        (3, 4, 5, 6, 8, 10), description="until=decided: the numbers of seeds after which verdicts are taken"
    )
    max_seeds: PositiveInt | None = Field(
        None, description="until=decided: the budget: looks end here, the last one at it; null: at the last of `looks`"
    )
    spending: Literal["linear", "pocock", "obrien_fleming"] = Field(
        "linear", description="how looks share the error: evenly by seeds, the first ones more, the last ones more"
    )
    margin: Annotated[float | str, BeforeValidator(_margin)] = Field(
        0.01,
        description="the gap that is still lossless, in nats per token or of `metric`; 2%: tokens more that may be "
        "needed, which takes the baseline at two other numbers of tokens",
    )
    confidence: float = Field(0.95, ge=0.5, lt=1, description="of all intervals of all looks together")
    metric: str = Field("val_loss", description="of the validation records, as `compare --metric`")
    tail: Fraction = Field(0.1, lt=1, description="last share of the steps, averaged over, as `compare --tail`")
    baseline: str | None = Field(
        None, description="what the others are held against, as `compare --baseline`; null: the usual one"
    )

    search: Literal["optuna", "halving"] | None = Field(
        None, description="optuna: values of intervals and choices are searched; halving: recipes drop out by rungs"
    )
    trials: PositiveInt = Field(20, description="search=optuna: how many, those that are pruned included")
    sampler: Literal["tpe", "random", "gp"] = Field("tpe", description="search=optuna: Optuna's sampler of this name")
    search_seed: int = Field(0, ge=0, lt=2**32, description="search=optuna: of the sampler")
    pruning: Literal["median", "none"] = Field(
        "median", description="search=optuna: median: end a trial whose paired gap is above the median of those before"
    )
    startup_trials: PositiveInt = Field(4, description="search=optuna: trials that are whole before any is pruned")
    rungs: Annotated[tuple[Fraction, ...], Field(strict=False, min_length=1)] = Field(
        (0.25, 0.5), description="search=halving: shares of the steps after which recipes may drop out"
    )

    @model_validator(mode="after")
    def _looks_ascend(self) -> Self:
        if list(self.looks) != sorted(set(self.looks)):
            raise ValueError(f"looks {list(self.looks)} must ascend, each number of seeds once")
        if self.looks[0] < FEWEST_AT_A_LOOK:
            raise ValueError(f"looks begin after {FEWEST_AT_A_LOOK} seeds at the earliest: one pair shows no spread")
        if self.max_seeds is not None and self.max_seeds < FEWEST_AT_A_LOOK:
            raise ValueError(f"max_seeds is {self.max_seeds}, and no look is before {FEWEST_AT_A_LOOK} seeds")
        return self

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.until is not None and self.search is not None:
            raise ValueError("until and search do not go together: a search has its own end")
        if list(self.rungs) != sorted(set(self.rungs)) or not self.rungs[0] > 0 or not self.rungs[-1] < 1:
            raise ValueError(f"rungs {list(self.rungs)} must ascend, each above 0 and below 1")
        if self.search == "halving" and isinstance(self.margin, str):
            raise ValueError(f"margin is {self.margin}, and search=halving takes one in nats: it judges on the way")
        return self

    @property
    def kind(self) -> str | None:
        """What makes it more than a product of values, as it is typed; None of a product."""
        if self.search is not None:
            return f"sweep.search={self.search}"
        return None if self.until is None else f"sweep.until={self.until}"

    @property
    def margin_nats(self) -> float:
        """The margin in nats; NaN of one in tokens."""
        return read_margin(self.margin)[0]

    @property
    def looks_within_budget(self) -> tuple[int, ...]:
        """The looks, the last one where the budget ends."""
        if self.max_seeds is None:
            return self.looks
        return (*(look for look in self.looks if look < self.max_seeds), self.max_seeds)


def read_sweep_keys(values: Any) -> SweepConfig:
    """Return the keys below `sweep`, checked. Raises ConfigError with all that is wrong with them."""
    try:
        keys = SweepConfig.model_validate(values)
    except ValidationError as error:
        details = error.errors()
        wrong = {each["loc"][0] for each in details if len(each["loc"]) > 1}  # pydantic counts the sound items alone
        reported = [each for each in details if each["type"] != "too_short" or each["loc"][0] not in wrong]
        raise ConfigError([_problem(each) for each in reported]) from error
    if problems := [*_unread(keys), *_never_pruned(keys)]:
        raise ConfigError(problems)
    return keys


def _unread(keys: SweepConfig) -> Iterator[Problem]:
    """Yield each key that is given, in a recipe's file or typed, and that this kind of sweep does nothing with."""
    for key, kinds in READ_BY.items():
        if key not in keys.model_fields_set or getattr(keys, key) is None or keys.kind in kinds:
            continue
        here = f"with {keys.kind} nothing reads it" if keys.kind else "this sweep has neither looks nor a search"
        yield Problem(f"sweep.{key}", f"is of {' and '.join(kinds)}, and {here}. Leave it out.")


def _never_pruned(keys: SweepConfig) -> Iterator[Problem]:
    """Yield a number of whole trials, given and no usual one, that leaves none of a search to be pruned."""
    if keys.search != "optuna" or keys.pruning == "none" or keys.startup_trials < keys.trials:
        return
    if "startup_trials" not in keys.model_fields_set:  # a first look by few trials, which more of them may follow
        return
    text = (
        f"is {keys.startup_trials}, and of sweep.trials={keys.trials} none would be left to prune. Give fewer, more "
        "trials, or sweep.pruning=none."
    )
    yield Problem("sweep.startup_trials", text)


def _problem(details: Any) -> Problem:
    location = ["sweep", *map(str, details["loc"])]
    key = ".".join(location)
    if details["type"] == "extra_forbidden":
        return Problem(key, f"unknown key.{did_you_mean(location[-1], SweepConfig.model_fields)}")
    if "also" in location:
        return Problem(key, "must be a list of lines like 'precision=bf16 seed=0,1'.")
    return problem_of({**details, "loc": location})


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
