"""A verdict in `compare.json`: its fields with their types, for `json_schema`."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from lightning_llm.compare.statistics.intervals import Decision

Number = float | None
Bounds = tuple[Number, Number]
Value = bool | int | float | str | list[Any] | dict[str, Any] | None
"""A value of a config key."""


class Part(BaseModel):
    """Base class of the objects in `compare.json`, which have exactly the declared fields."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, protected_namespaces=())


class Stability(Part):
    """The verdict on stability: failed seeds of a recipe and of the baseline."""

    verdict: Literal["unstable", "as stable", "open"]
    seeds: int
    failed_seeds: list[int]
    rate_ci: Bounds
    rate_upper_bound: float
    baseline_failed_seeds: list[int]
    baseline_rate_ci: Bounds
    discordant: tuple[int, int]
    """Numbers of seeds at which only the recipe failed, and only the baseline."""
    p: float
    level: float


class SpikesOfSeed(Part):
    """Numbers of loss spikes of the two runs of one seed."""

    seed: int
    recipe: int
    baseline: int


class SpikeVerdict(Part):
    """The verdict on loss spikes."""

    verdict: str
    counts: list[SpikesOfSeed]
    steps: int
    spiked_runs: int
    spiked_runs_ci: Bounds | None
    baseline_spiked_runs: int
    baseline_spiked_runs_ci: Bounds | None
    discordant: tuple[int, int]
    p_runs: float
    p_counts: float
    level: float


class Confounder(Part):
    """A key besides the factor that differs within a pair."""

    key: str
    values: list[Value]
    """All values of the key, the baseline's first."""


class DeclaredLookOfArm(Part):
    """The last declared look at a recipe, and its next one."""

    number: int
    of: int
    seeds: int
    interval_confidence: Number
    settled: bool
    next_seeds: int | None
    waits_for: list[str]


class LateSwitching(Part):
    """For branches: the steps at which they left their parent runs, and the scope of the verdict."""

    steps: list[int]
    max_steps: list[int]
    trunks: int
    seeds: int
    holds_for: str


class Difference(Part):
    """The gap of one seed."""

    seed: int
    gap: Number


class TimeToLoss(Part):
    """Ratios of tokens and seconds to a loss that both runs reached, recipe over baseline."""

    pairs: int
    tokens_ratio: Number
    seconds_ratio: Number


class TimeToTarget(Part):
    """Tokens to the target of --target, of the recipe and of the baseline."""

    target: float
    pairs: int
    arrived: int
    baseline_arrived: int
    tokens: Number
    baseline_tokens: Number
    tokens_ratio_bounds: Bounds
    slower: int
    faster: int
    p: float
    tokens_ratio_ci: Bounds | None
    confidence: float


class ValueOf(Part):
    """A value of the tuned key, with its owner: "own" (the recipe) or "baseline's"."""

    whose: str
    value: Value


class Tuned(Part):
    """Result of the tests over the grid of --best-of."""

    key: str
    value: Value
    baseline_value: Value
    withheld: str | None
    because: list[ValueOf]
    unjudged: list[Value]


class Quantized(Part):
    """The part of the model that the recipe quantizes."""

    linears: int
    all_linears: int
    blocks: int
    all_blocks: int
    shortfall: str


class EffectiveData(Part):
    """The gap in tokens: the share of further tokens that the recipe needs."""

    ratio: Number
    ci: Bounds
    more_tokens: Number
    more_tokens_ci: Bounds
    seeds: int


class Curve(Part):
    """The mean gap along the run, at each validation that all runs of the recipe have."""

    steps: list[int]
    tokens: list[int]
    gap: list[Number]
    low: list[Number]
    high: list[Number]
    confidence: float


class Verdict(Part):
    """The verdict on one recipe in one setting."""

    name: str
    verdict: Decision
    qualified: str
    gap: Number
    ci: Bounds
    pairs: int
    controlled: bool
    records_verified: bool
    damaged: list[str]
    confounders: list[Confounder]
    parameters: int | None
    tokens: int | None
    model: str | None
    setting: dict[str, Value]
    baseline: str
    margin: Number
    token_margin: Number
    confidence: float
    look: DeclaredLookOfArm | None
    late_switching: LateSwitching | None
    reason: str
    loss_verdict: Decision
    loss_pairs: int
    stability: Stability
    diverged_seeds: list[int]
    baseline_diverged_seeds: list[int]
    outlier_seeds: list[int]
    missing_seeds: list[int]
    baseline_learned: bool
    more_seeds: int | None
    seeds_if_no_gap: int | None
    seeds_if_lossy: int | None
    seeds_if_stable: int | None
    aa_floor: Number
    aa_pairs: int
    sd: Number
    df: Number
    pooled_with: int
    comparisons: int
    identical: bool
    may_not_have_acted: bool
    differences: list[Difference]
    tail_steps: list[int]
    loss: Number
    baseline_loss: Number
    gap_high_precision: Number
    gap_by_source: dict[str, Number]
    time_to_loss: TimeToLoss
    tokens_per_second: Number
    tokens_per_second_ratio: Number
    peak_memory_bytes: Number
    peak_memory_ratio: Number
    skipped_steps: int
    spikes: int
    speed_confounders: list[str]
    time_to_target: TimeToTarget | None
    spike_verdict: SpikeVerdict
    tuned: Tuned | None
    emulated: bool
    quantized: Quantized | None
    effective_data: EffectiveData | None
    net_speed: Number
    line: str
    curve: Curve
