"""Differences between a resumed run and its earlier parts, which a comparison has to know of."""

import json
from typing import Any

from lightning_llm.config.config_hash import NOT_IDENTITY, below, flatten
from lightning_llm.config.from_file import load_config
from lightning_llm.config.schema import Config
from lightning_llm.data.mixing.addressing import Mixture, MixturePhase
from lightning_llm.data.mixing.skipped import SKIPPED_SAMPLES
from lightning_llm.optim.schedule import learning_rate_factor
from lightning_llm.run.resume.start import Start
from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.provenance import origin_changes, origin_of


def resume_history(config: Config, start: Start, summary: dict[str, Any]) -> dict[str, list[Any]]:
    """Return {key: values that earlier parts of the run had and this one has not}; {} for a run that begins here.

    So does a branch: what its trunk had otherwise stands in the summary as what the branch changed.

    Keys are those of the config that may change on resume, and of where the numbers come from (versions, device, code,
    threads, backend), as `summary` says it for this part. `trainer.max_steps` is among them only where the learning
    rate or the casts of a step that is kept followed from it. To be asked before the folder's config.yaml is replaced.
    """
    if start.checkpoint is None or start.trunk is not None or start.step == 0:
        return {}
    origin = start.checkpoint.run_folder
    before = summary_of(origin)
    old = load_config(origin / "config.yaml", [])
    was, now = flatten(old.model_dump(mode="json")), flatten(config.model_dump(mode="json"))
    keys = {key for key in was.keys() | now.keys() if not below(key, NOT_IDENTITY)}
    changed = {key for key in keys if was.get(key) != now.get(key)}
    if _same_course(old, config, start.step):
        changed.discard("trainer.max_steps")
    found: dict[str, list[Any]] = {key: list(values) for key, values in before.get("earlier", {}).items()}
    for key in sorted(changed):
        found.setdefault(key, []).append(was.get(key))
    for key, (earlier, _) in origin_changes(origin_of(before), origin_of(summary)).items():
        if key != SKIPPED_SAMPLES:  # what differs there lies ahead: `rollbacks.other_samples`
            found.setdefault(key, []).append(earlier)
    return {key: _distinct(values) for key, values in found.items()}


def _same_course(old: Config, new: Config, steps: int) -> bool:
    """Whether the first `steps` steps had the learning rates, casts and data that they have in the run as it is now."""

    def course(config: Config, step: int) -> tuple[float, list[bool]]:
        last = config.trainer.max_steps
        phases = [phase.start * last <= step < phase.end * last for phase in config.precision.phases]
        schedule = config.schedule.relative_to(config.optim.learning_rate)
        return learning_rate_factor(schedule, step, last), phases

    def phases_of_data(config: Config) -> list[MixturePhase]:
        width, last = config.data.global_batch_size, config.trainer.max_steps
        mixture: Mixture = config.data.chosen_mixture.build(config.data.trained_weights, width, last)
        return list(mixture.phases(steps * width))

    if phases_of_data(old) != phases_of_data(new):
        return False
    return all(course(old, step) == course(new, step) for step in range(steps))


def _distinct(values: list[Any]) -> list[Any]:
    return list({json.dumps(value, sort_keys=True): value for value in values}.values())
