"""Keys in which two runs differ, and the meaning of such a difference for a verdict."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_llm.compare.runs.branches import equivalent_starts
from lightning_llm.compare.runs.losses import LOSS
from lightning_llm.config.config_hash import NOT_IDENTITY, OBSERVERS, below, is_data_path
from lightning_llm.tracking.provenance import FINGERPRINT, git_of, has_fingerprint
from lightning_llm.tracking.reading import EARLIER, Run, facts, measured_on

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
"""No difference in these changes training: names, places, observers, and keys resolved into others
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
"""Free, too, between two layouts that both train to the bits of a single rank (docs/explanation/same_bits.md)."""

ROUNDING = (
    *LAYOUT, "compiled", "data.micro_batch_size", "trainer.threads", "threads", "trainer.attention_kernel"
)  # fmt: skip
"""These only change the order of sums. Two runs of one recipe and seed that differ in nothing else are an A/A pair."""

VALIDATION = ("data.tokenizer.", "data.validation.", "data.sources.", "data.sequence_length", "data.document_mask")
"""Keys that determine the validation tokens, for runs without a hash of the set in their summaries."""


def all_differences(one: Run, other: Run) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value in one, value in other)} over resolved configs and recorded facts; None for a missing value.

    Includes keys about the storage of a run; `meaningful` leaves them out.
    """
    return _unequal(one.config, other.config) | _unequal(_comparable_facts(one, other), _comparable_facts(other, one))


def meaningful(
    one: Run, other: Run, except_below: Iterable[str] = (), metric: str = LOSS
) -> dict[str, tuple[Any, Any]]:
    """Return the differences that can change training, or its measurement by `metric`.

    Without the keys in `except_below` and the seed.
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
    """Return the hashes of the training data of `runs`, with None for a run without one."""
    return {facts(run).get("data_hash") for run in runs}


def equal_by_hash(runs: Sequence[Run], metric: str) -> tuple[str, ...]:
    """Return keys or prefixes that may differ because hashes show that the data are equal.

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
    """Return whether the configs agree in everything that can change training, except `except_below` and the seed.

    For an unfinished run: its summary may lack facts.
    """
    free = (*FREE, "seed", *except_below)
    return all(below(key, free) for key in _unequal(one.config, other.config))


def validation_differences(one: Run, other: Run, metric: str) -> dict[str, tuple[Any, Any]]:
    """Return the differences that make `metric` of two runs incomparable; empty if it is comparable.

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
