"""How a run will resume or branch: whether it can, and the lines of `train` and `plan` on it. Imports no torch."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.branching import changed_keys
from lightning_llm.config.config_hash import differences_on_resume
from lightning_llm.config.from_file import is_run_file, load_config, moved_from
from lightning_llm.config.overrides import typed_value
from lightning_llm.config.schema import Config
from lightning_llm.config.weight_folders import TOKENIZER
from lightning_llm.config.workspace import same_folder
from lightning_llm.data.mixing.addressing import Mixture
from lightning_llm.optim.schedule import learning_rate_factor
from lightning_llm.run.resume.branch import look_once
from lightning_llm.run.resume.start import Start, decide_start, first_start
from lightning_llm.tracking.files import tokenizer_problem
from lightning_llm.tracking.run_state import is_among_jobs, state_of
from lightning_llm.train.checkpoint.manifest import UNSEALED, step_folders
from lightning_llm.train.checkpoint.verification import skipped_lines

MADE_OF_TIME = re.compile(r"-\d{8}-\d{6}$")
"""The end of a run.name that conf/config.yaml makes."""


def planned_start(config: Config, words: Sequence[str] | None) -> tuple[Start, list[str]]:
    """Return how `train` would start the run, and what to say of that.

    `words` are those that were typed; None: the config is a file's. A new run is planned whatever lies in its folder,
    which may be on another machine; what `train` refuses there is said.

    Raises:
        ConfigError: `train` could not go on as `resume` says, or not from the run's trunk.
    """
    if config.resume is not None:
        if config.resume == "auto" and words is not None:
            refuse_unnamed_resume(config, words)
        start = decide_start(config, look_once)
        return start, [start.nothing_left(config)] if start.finished else resume_lines(config, start)
    try:
        return decide_start(config, look_once), []
    except ConfigError as error:
        of_folder = [each for each in error.problems if each.key == "run.dir"]
        if len(of_folder) < len(error.problems):
            raise
    return first_start(config, look_once), [f"note   train refuses run.dir: {each.text}" for each in of_folder if words]


def refuse_unnamed_resume(config: Config, overrides: Sequence[str]) -> None:
    """Return quietly unless the run's name is made of the time, under which there can be nothing to go on with.

    Raises:
        ConfigError: it is; with the newest run of the experiment that would go on.
    """
    if any(typed_value(overrides, key) for key in ("run.name", "run.dir")) or not MADE_OF_TIME.search(config.run.name):
        return
    text = f"is auto, and run.name is made of the time ({config.run.name}): no earlier run can be found by it. "
    found = resumable_runs(config)
    if found:
        text += f"Set run.dir={shlex.quote(str(found[0]))}, which is the newest run that this config goes on with"
        text += f" (of {len(found)})." if len(found) > 1 else "."
    else:
        text += f"Set run.name or run.dir. No unfinished run in {Path(config.run.dir).parent} has this config."
    raise ConfigError(Problem("resume", text))


def resumable_runs(config: Config) -> list[Path]:
    """Return the folders of the experiment's runs that `resume=auto` would go on with, the newest first."""
    found = []
    for file in Path(config.run.dir).parent.glob("*/config.yaml"):
        try:
            old = load_config(file, [])
        except ConfigError:  # of another version, say: not one to go on with
            continue
        state = state_of(file.parent)
        unfinished = state in ("stopped", "failed") or old.trainer.max_steps < config.trainer.max_steps
        saved = step_folders(file.parent / "checkpoints")
        if unfinished and saved and state != "running" and not differences_on_resume(old, config):
            found.append((saved[0].stat().st_mtime, file.parent))
    return [folder for _, folder in sorted(found, reverse=True)]


def resume_lines(config: Config, start: Start) -> list[str]:
    """Return where the run goes on from, and what going further does to a schedule that ends with trainer.max_steps."""
    if config.resume is None or (start.checkpoint is None and is_among_jobs()):  # which all ask to go on
        return []
    lines = list(skipped_lines(start.passed_over))
    if start.checkpoint is None:
        which = "other checkpoint" if lines else "checkpoint"
        return [*lines, f"resume none: {config.run.dir} holds no {which}, so the run begins at step 0"]
    lines.append(f"resume from step {start.step}: {start.checkpoint.folder}")
    folder = Path(config.run.dir)
    own = same_folder(start.checkpoint.run_folder, folder)
    if own and (left := moved_from(folder / "config.yaml")):
        both = f". {left} holds a run, too, and stays as it is" if is_run_file(left / "config.yaml") else ""
        lines.append(f"note   the run was in {left} before, and continues in {folder}{both}")
    if own and (problem := tokenizer_problem(folder)):
        lines.append(f"note   {folder / TOKENIZER} {problem}; it is written anew")
    if start.checkpoint.version == UNSEALED:
        lines.append(
            f"note   {start.checkpoint.folder.name} was written before checkpoints had digests: its tensors were held "
            "against their CRC-32, the rest of it cannot be verified"
        )
    before = load_config(start.checkpoint.run_folder / "config.yaml", []).trainer.max_steps
    lines += _end_lines(start, before, config.trainer.max_steps)
    schedule, now = config.schedule, config.trainer.max_steps
    if schedule.name != "constant" and schedule.total_steps is None and before != now:
        lines.append(
            f"note   the schedule ends with trainer.max_steps, which was {before} and is {now}: the learning rate goes "
            f"on as in a run of {now} steps. schedule.total_steps={before} keeps it as it was"
        )
    mixture = config.data.chosen_mixture
    if mixture.follows_max_steps and before != now:
        what = "phases start at shares of" if mixture.pace is None else "order is that of a run of"
        lines.append(
            f"note   data.mixture's {what} trainer.max_steps, which was {before} and is {now}: they "
            f"begin at other steps than before. data.mixture.total_steps={before} keeps them as they were"
        )
    if config.precision.phases and before != now:
        lines.append(
            f"note   precision.phases are shares of trainer.max_steps, which was {before} and is {now}: they begin and "
            "end at other steps than before"
        )
    return lines


def branch_lines(config: Config, start: Start) -> list[str]:
    """Return what a branch prints as it starts: its trunk, what was changed, and what that does to rate and data."""
    checkpoint, trunk = start.checkpoint, start.trunk
    if checkpoint is None or trunk is None:
        return []
    updates = checkpoint.step - int(checkpoint.progress["skipped_steps"])
    return [
        f"branch from step {checkpoint.step} of {trunk.trainer.max_steps} to {config.trainer.max_steps}: "
        f"{checkpoint.folder}",
        f"branch changes {'; '.join(_changes(trunk, config)) or 'nothing: it goes on as the trunk does'}",
        *_rate_lines(trunk, config, updates),
        *_data_lines(trunk, config, checkpoint.step),
    ]


def _changes(trunk: Config, config: Config) -> Iterator[str]:
    """Yield what was changed: a group whose name is another by its names, else key by key."""
    changed = changed_keys(trunk, config)
    renamed = [key.removesuffix(".name") for key in changed if key.endswith(".name") and key.count(".") == 1]
    for group in renamed:
        before, after = changed[f"{group}.name"]
        yield f"{group} {before} -> {after}"
    for key, (before, after) in changed.items():
        if key.partition(".")[0] not in renamed:
            yield f"{key} {_shown(before)} -> {_shown(after)}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _rate_lines(trunk: Config, config: Config, updates: int) -> Iterator[str]:
    """Yield that the learning rate of the next update is another than it would be in the trunk."""

    def rate(each: Config) -> float:
        schedule = each.schedule.relative_to(each.optim.learning_rate)
        return each.optim.learning_rate * learning_rate_factor(schedule, updates, each.trainer.max_steps)

    before, after = rate(trunk), rate(config)
    if before != after:
        yield f"note   the next update's learning rate is {after:.4g}, where the trunk's would be {before:.4g}"


def _data_lines(trunk: Config, config: Config, step: int) -> Iterator[str]:
    """Yield which sources do not go on where the trunk left them."""
    drawn = []
    if any(each.data.chosen_mixture.shares_by_tokens for each in (trunk, config)):
        return  # known once documents are chosen
    for each in (trunk, config):
        width = each.data.global_batch_size
        mixture: Mixture = each.data.chosen_mixture.build(each.data.trained_weights, width, each.trainer.max_steps)
        drawn.append(dict(zip(mixture.names, mixture.drawn(step * width), strict=True)))
    before, after = drawn
    for name in sorted(after):
        if name in before and after[name] != before[name]:
            yield (
                f"note   data.sources.{name}: the trunk has drawn {before[name]:,} sequences of it, and this mixture "
                f"counts {after[name]:,} at step {step}: some are read twice, or left out, in this epoch"
            )


def _end_lines(start: Start, before: int, now: int) -> list[str]:
    """Return what to say of a run that ends where it is, or earlier than was planned `before`."""
    if start.step == now:
        return [f"note   trainer.max_steps={now} is the step that is made: no other follows, and the run ends here"]
    if now < before:
        return [f"note   trainer.max_steps was {before} and is {now}: the run ends at step {now}"]
    return []
