"""Keys in which two runs differ, and the meaning of such a difference for a verdict; branches off a parent run.

Two branches off one checkpoint share everything before it, so their difference is the effect of switching a recipe on
late. The replicates determine the meaning of the interval. Several parent runs, each of a seed that its branches keep,
are replicates of the whole experiment: seeds as blocks, as for whole runs. Several seeds after one parent run repeat
only the part after it (order of data, random bits). Counted as replicates of parent runs they would be pseudoreplicates
(S. H. Hurlbert, Ecological Monographs 54 (1984) 187-211), so each parent run is then judged separately.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_llm.compare.runs.losses import LOSS
from lightning_llm.config.config_hash import NOT_IDENTITY, OBSERVERS, below, is_data_path
from lightning_llm.tracking.provenance import FINGERPRINT, git_of, has_fingerprint
from lightning_llm.tracking.reading import EARLIER, Run, facts, measured_on

BRANCH_KEY = "branch_from"
FREE = (
    *NOT_IDENTITY,
    "recipe",
    "checkpoint.",
    "callbacks.",
    "data.cache_dir",
    "data.num_workers",
    "data.name",
    "data.skip_samples",
    "model.name",
    "model.parameters_published",
    "parallel.compile",
    "parallel.name",
    "parallel.timeout_seconds",
    "precision.name",
    "precision.reference",
    "precision.hardware",
    "trainer.name",
    "trainer.accelerator",
    "trainer.compile",
    "trainer.validate_every_steps",
    f"{FINGERPRINT}.os",
)
"""Keys that do not change training: names, places, observers, and keys resolved into others
(`trainer.accelerator` in the device, `*.compile` in `compiled`, `precision.backend` in the summary's,
`data.skip_samples` in `skipped_samples`)."""

LAYOUT = (
    "parallel.dp_replicate",
    "parallel.dp_shard",
    "parallel.cp",
    "parallel.tp",
    "parallel.pp",
    "parallel.schedule",
    "parallel.virtual_stages",
    "parallel.zero_stage",
    "parallel.reduction",
    "parallel.activation_checkpoint",
    "parallel.activation_checkpoint_every",
    "parallel.activation_checkpoint_layers",
    "trainer.devices",
    "world",
)
"""Keys that change nothing either between two layouts that both train to the bits of a single rank
(docs/explanation/same_bits.md)."""

ROUNDING = (
    *LAYOUT, "compiled", "data.micro_batch_size", "trainer.threads", "threads", "trainer.attention_kernel"
)  # fmt: skip
"""Keys that only change the order of sums. Two runs of one recipe and seed that differ in nothing else are an A/A
pair: their distance is noise."""

VALIDATION = ("data.tokenizer.", "data.validation.", "data.sources.", "data.sequence_length", "data.document_mask")
"""Keys that determine the validation tokens, for runs without a hash of the set in their summaries."""


def all_differences(one: Run, other: Run) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value in one, value in other)} of all differences in resolved configs and recorded facts.

    None stands for a missing value. Keys about the storage of a run are included; `meaningful` leaves them out.
    """
    return _unequal(one.config, other.config) | _unequal(_comparable_facts(one, other), _comparable_facts(other, one))


def meaningful(
    one: Run, other: Run, except_below: Iterable[str] = (), metric: str = LOSS
) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value in one, value in other)} of the differences that can change training or `metric`.

    The seed and keys at or below those of `except_below` are left out.
    """
    free = (*FREE, "seed", *except_below)
    if one.bitwise_layout and other.bitwise_layout:
        free += LAYOUT
    if None not in data_hashes([one, other]):  # hashes identify the data, wherever they are stored
        free += tuple(filter(is_data_path, one.config | other.config))
    free += equal_by_hash([one, other], metric)
    free += equivalent_starts([one, other])
    digests = {facts(run).get("init_digest") for run in (one, other)}
    if len(digests) == 1 and None not in digests:  # the same weights, wherever they are stored
        free += ("model.init_from",)
    teachers = {facts(run).get("teachers") for run in (one, other)}
    if len(teachers) == 1 and None not in teachers:  # likewise
        free += ("distil.teachers",)
    differing = all_differences(one, other)
    acting = _foreign_callbacks(one) | _foreign_callbacks(other)
    return {
        key: values
        for key, values in differing.items()
        if not below(key.removeprefix(EARLIER), free) or below(key, tuple(acting))
    }


def data_hashes(runs: Iterable[Run]) -> set[str | None]:
    """Return the set of hashes of the training data of `runs`; None stands for a run without one."""
    return {facts(run).get("data_hash") for run in runs}


def equal_by_hash(runs: Sequence[Run], metric: str) -> tuple[str, ...]:
    """Return the keys and prefixes of keys that do not matter because hashes show that the data are equal.

    If all of `runs` learned from the same data: the keys of sources that none of them drew from. If `metric` is of one
    source and all measured it on the same data: the other validation sources.
    """
    hashes = data_hashes(runs)
    if None in hashes or len(hashes) > 1:
        return ()
    configs = [run.typed for run in runs if run.typed is not None]
    drawn = {name for config in configs for name in config.data.drawn}
    unused = {name for config in configs for name in config.data.sources} - drawn
    free = tuple(f"data.sources.{name}." for name in sorted(unused)) if len(configs) == len(runs) else ()
    measured = {measured_on(run, metric) for run in runs}
    if "/" in metric and len(measured) == 1 and None not in measured:
        free += ("validation_hash", "data.validation.")
    return free


def _foreign_callbacks(run: Run) -> set[str]:
    """Return the key prefixes of callbacks from other packages: they may do more than observe."""
    return {
        key.removesuffix("_target_")
        for key, target in run.config.items()
        if key.startswith("callbacks.") and key.endswith("._target_") and not str(target).startswith(OBSERVERS)
    }


def same_config(one: Run, other: Run, except_below: Iterable[str] = ()) -> bool:
    """Return whether two configs agree in everything that can change training, except the seed and `except_below`.

    Recorded facts are not compared, because the summary of an unfinished run may lack them.
    """
    free = (*FREE, "seed", *except_below)
    return all(below(key, free) for key in _unequal(one.config, other.config))


def validation_differences(one: Run, other: Run, metric: str) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value in one, value in other)} that makes `metric` of two runs incomparable; {} if comparable.

    Runs of earlier releases have no hash per source; for these the hash of the whole validation set is compared.
    """
    for name in (metric, LOSS):
        ours, theirs = measured_on(one, name), measured_on(other, name)
        if ours is not None and theirs is not None:
            return {} if ours == theirs else {"validation_hash": (ours, theirs)}
    differing = _unequal(one.config, other.config)
    return {key: values for key, values in differing.items() if below(key, VALIDATION)}


def _unequal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = sorted(ours.keys() | theirs.keys())
    return {key: (ours.get(key), theirs.get(key)) for key in keys if ours.get(key) != theirs.get(key)}


def _comparable_facts(run: Run, other: Run) -> dict[str, Any]:
    """Return the run's facts, without those of git if both runs have a hash of the code.

    Without the backend if one of the two casts nothing and so has none: that is part of the recipe. Without a
    fingerprint if the other run is from a release that recorded none.
    """
    found, others = dict(facts(run)), facts(other)
    if not has_fingerprint(others):
        recorded = {key for key in found if below(key.removeprefix(EARLIER), (f"{FINGERPRINT}.",))}
        found = {key: value for key, value in found.items() if key not in recorded}
    if "backend" not in others:
        found.pop("backend", None)
        found.pop(f"{EARLIER}backend", None)
    if "code_hash" in found and "code_hash" not in others:
        del found["code_hash"]
        found |= git_of(run.summary)
    return found


@dataclass(frozen=True)
class Switch:
    """Steps at which the branches behind a verdict left their parent runs (`steps`), of `max_steps` in all.

    `trunks`: number of parent runs; `seeds`: number of seeds of the branches.
    """

    steps: tuple[int, ...]
    max_steps: tuple[int, ...]
    trunks: int
    seeds: int

    @property
    def text(self) -> str:
        """The scope of the verdict as text: "holds for late switching only: from step 200 of 400, ..."."""
        steps, last = (" or ".join(map(str, each)) for each in (self.steps, self.max_steps))
        if self.trunks > 1:
            over = f"over {self.trunks} parent runs"
        else:
            over = f"after one parent run, over {self.seeds} seed{'s' * (self.seeds > 1)}"
        return f"holds for late switching only: from step {steps} of {last}, {over}"

    def as_data(self) -> dict[str, Any]:
        """Return the entry "late_switching" of `compare.json`."""
        return {
            "steps": list(self.steps),
            "max_steps": list(self.max_steps),
            "trunks": self.trunks,
            "seeds": self.seeds,
            "holds_for": self.text,
        }


def switch_of(runs: Sequence[Run]) -> Switch | None:
    """Return the steps at which the branches in `runs` left their parent runs; None if no run is a branch."""
    branches = [run for run in runs if run.branch]
    if not branches:
        return None
    return Switch(
        tuple(sorted({run.branch_step for run in branches})),
        tuple(sorted({int(run.config.get("trainer.max_steps") or 0) for run in branches})),
        len({_root(run) for run in branches}),
        len({run.seed for run in branches}),
    )


def equivalent_starts(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return ("branch_from",) if that key may differ within `runs` without a difference between recipes, else ().

    That is so if all branch off the same state, wherever it is stored. It is also so if they branch off several parent
    runs at one step, each with a seed that its branches keep (so the seed identifies it), and none is a branch of
    another's parent run.
    """
    if not runs or not all(run.branch for run in runs):
        return ()
    states = {run.branch.get("digest") for run in runs}
    if len(states) == 1:
        return (BRANCH_KEY,)
    kept = all(run.branch.get("seed") == run.seed for run in runs)
    trunks = {run.seed: run.branch.get("digest") for run in runs}
    one_each = all(run.branch.get("digest") == trunks[run.seed] for run in runs)
    apart = len({_root(run) for run in runs}) == len(states)
    return (BRANCH_KEY,) if kept and one_each and apart and len({run.branch_step for run in runs}) == 1 else ()


def _root(run: Run) -> Any:
    """Return the id of the whole run at the root of the branch, through all branches between."""
    return run.branch.get("root_run_id") or run.branch.get("run_id") or run.branch.get("digest")


def parent_runs_are_replicates(runs: Sequence[Run]) -> bool:
    """Return whether each parent run is a replicate of the experiment, so that more seeds require more parent runs."""
    return len({run.branch.get("digest") for run in runs}) > 1 and equivalent_starts(runs) == (BRANCH_KEY,)


def notes_on_branches(runs: Sequence[Run]) -> list[str]:
    """Return the notes of a report on verdicts over branches; [] if no run is a branch."""
    switch = switch_of(runs)
    if switch is None:
        return []
    notes = [
        "Branches share everything before their first step: a verdict on them is about a recipe that is switched on "
        "there. The same recipe from the first step on may cost more."
    ]
    if parent_runs_are_replicates(runs):
        notes.append("Each seed here is a parent run: more seeds require more parent runs with their branches.")
    if switch.trunks == 1:
        notes.append(
            "All branch off one parent run: the interval covers the part after it (seeds: order of data, random bits), "
            "not parent runs. To include those, branch off several: branch_from=PARENT_A,PARENT_B,..."
        )
    return notes
