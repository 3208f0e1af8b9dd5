"""The JSON Schema of `compare.json` and `compare --json`: every field with its type, and no others.

Each class is one object of the file. `null`: a number that is not finite, or a part that does not apply.
`tests/compare/test_json_schema.py` validates every kind of comparison: a new field of `as_data` is added here.
"""

from typing import Any, Literal

from pydantic.json_schema import GenerateJsonSchema

from lightning_llm.compare.comparison import SCHEMA_VERSION
from lightning_llm.compare.curves.columns import Kind, Unit
from lightning_llm.compare.requirement import Outcome, Required
from lightning_llm.compare.statistics.intervals import Decision
from lightning_llm.compare.verdict_schema import Bounds, Number, Part, Value, Verdict


class LossOfSeed(Part):
    """The baseline's loss at one seed."""

    seed: int
    loss: Number


class Baseline(Part):
    """Figures of the baseline in one setting."""

    name: str
    setting: dict[str, Value]
    seeds: list[int]
    loss: Number
    losses: list[LossOfSeed]
    tokens_per_second: Number
    peak_memory_bytes: Number
    spikes: int
    skipped_steps: int


class NoiseFloor(Part):
    """The A/A floor: noise of runs that differ only in the order of sums."""

    setting: dict[str, Value]
    floor: Number
    pairs: int
    losses: list[list[Number]]
    identical: int
    unlearned: int
    keys: list[str]
    runs: list[list[str]]


class PairGap(Part):
    """The gap of one recipe to another (--all-pairs)."""

    recipe: str
    other: str
    setting: str
    verdict: Decision
    gap: Number
    ci: Bounds
    pairs: int
    controlled: bool


class Choice(Part):
    """The value of the tuned key chosen for one recipe."""

    recipe: str
    value: Value
    losses: dict[str, Number]
    plateau: Bounds | None
    at_the_edge: bool


class Selection(Part):
    """The values of the tuned key that --best-of chose."""

    key: str
    seeds: list[int]
    choices: list[Choice]


class Advice(Part):
    """The command that adds seeds, and the recipes that these would decide."""

    command: str
    more_seeds: int
    decides: list[str]


class RecordedLook(Part):
    """One look (comparison at one time) as recorded in `looks.json`."""

    at: str
    seen: str
    margin: Number
    confidence: float
    metric: str
    tail: float
    pairs: dict[str, int]
    verdicts: dict[str, str]
    token_margin: Number
    baseline: str
    data: str
    spent: Number
    budget: Number
    planned_looks: int | None
    losses: dict[str, dict[str, list[float]]] | None
    measured_in: str | None


class DerivedLevels(Part):
    """Error rates of the declared looks."""

    interval_confidences: list[float]
    failure_levels: list[float]


class DeclaredLooks(Part):
    """Looks that the sweep declared before its first run, with the terms of its verdicts."""

    looks: list[int]
    spending: str
    margin: float | str
    confidence: float
    metric: str
    tail: float
    baseline: str | None
    seeds: list[int]
    recipes: int
    derived: DerivedLevels
    hash: str


class RequiredOfArm(Part):
    """Whether one recipe has the required verdict."""

    name: str
    setting: dict[str, Value]
    verdict: Decision
    outcome: Outcome


class ErrorBudget(Part):
    """The error that this look used of the budget of its series."""

    series: str
    """File that records the looks of the series."""
    look: int
    """Number of this look; 0 for a look that uses no error, because no recipe has two pairs."""
    budget: float
    spent: float
    left: float
    planned_looks: int | None


class Requirement(Part):
    """Whether all recipes have the verdict of --require."""

    required: Required
    met: bool
    exit_code: Literal[0, 1, 2, 3]
    arms: list[RequiredOfArm]
    error_budget: ErrorBudget | None


class Problem(Part):
    """A problem of an argument or a run."""

    key: str
    text: str


class RunOfComparison(Part):
    """One run of the comparison."""

    folder: str
    level: str
    seed: int
    status: str | None
    mlflow_run_id: str | None
    records_verified: bool


class Log(Part):
    """The audit of one log of another trainer (--from): its column and its points on the axis."""

    arm: str
    seed: int | None
    source: str
    format: str
    column: str
    kind: Kind
    unit: Unit
    axis: str
    points: int
    first: float
    last: float
    tokens: int | None
    gaps: list[list[float]]
    restarts: list[float]
    not_finite: int
    settings: dict[str, str]
    notes: list[str]


class ComparisonFile(Part):
    """Content of `compare.json`."""

    schema_version: Literal[1]
    factor: str
    baseline: str
    margin: Number
    token_margin: Number
    confidence: float
    metric: str
    verdicts: list[Verdict]
    baselines: list[Baseline]
    aa: list[NoiseFloor]
    all_pairs: list[PairGap]
    selection: Selection | None
    advice: Advice | None
    looks: list[RecordedLook]
    sequential: DeclaredLooks | None
    require: Requirement | None
    logs: list[Log]
    not_verified: list[str]
    problems: list[Problem]
    notes: list[str]
    methods: list[str]
    references: dict[str, str]
    runs: list[RunOfComparison]


class _WithoutTitles(GenerateJsonSchema):
    """Leaves out the titles of fields, which repeat their names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def compare_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of `compare.json`."""
    about = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"lightning-llm compare --json, schema_version {SCHEMA_VERSION}",
    }
    return {**ComparisonFile.model_json_schema(schema_generator=_WithoutTitles), **about}
