"""Forecast of how a run will start (resume, branch or begin), and the lines of `train` and `plan` about it. No
torch."""

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
from lightning_llm.optim.kinds import learning_rate_factor
from lightning_llm.run.resume.branch import look_once
from lightning_llm.run.resume.start import Start, decide_start, first_start
from lightning_llm.tracking.files import tokenizer_problem
from lightning_llm.tracking.run_state import is_among_jobs, state_of
from lightning_llm.train.checkpoint.manifest import UNSEALED, step_folders
from lightning_llm.train.checkpoint.verification import skipped_lines

WITH_TIMESTAMP = re.compile(r"-\d{8}-\d{6}$")
"""End of the default run.name in conf/config.yaml."""


def planned_start(config: Config, words: Sequence[str] | None) -> tuple[Start, list[str]]:
    """Return how `train` would start the run, and the lines to print about it. Changes nothing.

    `words`: the overrides; None: the config is from a file. A new run is planned even if its folder is not empty,
    since it may run on another machine; a note reports that `train` would reject the folder.

    Raises:
        ConfigError: `train` could not resume, or not branch from the parent run.
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
    lines = [f"note   `train` would reject run.dir: {each.text}" for each in of_folder if words]
    return first_start(config, look_once), lines


def refuse_unnamed_resume(config: Config, overrides: Sequence[str]) -> None:
    """Reject resume=auto for a default run.name, which contains a timestamp, so that no earlier run has it.

    Raises:
        ConfigError: with the newest run of the experiment that could be resumed.
    """
    named = any(typed_value(overrides, key) for key in ("run.name", "run.dir"))
    if named or not WITH_TIMESTAMP.search(config.run.name):
        return
    text = f"needs an explicit run.name or run.dir, because the default ({config.run.name}) contains a timestamp. "
    found = resumable_runs(config)
    if found:
        text += f"Set run.dir={shlex.quote(str(found[0]))} to resume the newest matching run"
        text += f" (of {len(found)})." if len(found) > 1 else "."
    else:
        text += f"No unfinished run in {Path(config.run.dir).parent} has this config."
    raise ConfigError(Problem("resume", text, "auto"))


def resumable_runs(config: Config) -> list[Path]:
    """Return the folders of the experiment's runs that `resume=auto` could resume, the newest first."""
    found = []
    for file in Path(config.run.dir).parent.glob("*/config.yaml"):
        try:
            old = load_config(file, [])
        except ConfigError:  # for example of another version: cannot be resumed
            continue
        state = state_of(file.parent)
        unfinished = state in ("stopped", "failed") or old.trainer.max_steps < config.trainer.max_steps
        saved = step_folders(file.parent / "checkpoints")
        if unfinished and saved and state != "running" and not differences_on_resume(old, config):
            found.append((saved[0].stat().st_mtime, file.parent))
    return [folder for _, folder in sorted(found, reverse=True)]


def resume_lines(config: Config, start: Start) -> list[str]:
    """Return lines about the checkpoint that the run resumes from, and the effects of a changed trainer.max_steps."""
    if config.resume is None or (start.checkpoint is None and is_among_jobs()):  # all jobs of a sweep have resume=auto
        return []
    lines = list(skipped_lines(start.skipped))
    if start.checkpoint is None:
        which = "other checkpoint" if lines else "checkpoint"
        return [*lines, f"resume none: no {which} in {config.run.dir}, the run begins at step 0"]
    lines.append(f"resume from step {start.step}: {start.checkpoint.folder}")
    folder = Path(config.run.dir)
    own = same_folder(start.checkpoint.run_folder, folder)
    if own and (left := moved_from(folder / "config.yaml")):
        both = f". {left} still contains a run and is not changed" if is_run_file(left / "config.yaml") else ""
        lines.append(f"note   the run was moved from {left} and continues in {folder}{both}")
    if own and (problem := tokenizer_problem(folder)):
        lines.append(f"note   {folder / TOKENIZER} {problem}; it is written again")
    if start.checkpoint.version == UNSEALED:
        lines.append(
            f"note   {start.checkpoint.folder.name} is from an earlier release without digests: only its tensors were "
            "verified (by CRC-32)"
        )
    before = load_config(start.checkpoint.run_folder / "config.yaml", []).trainer.max_steps
    lines += _end_lines(start, before, config.trainer.max_steps)
    schedule, now = config.schedule, config.trainer.max_steps
    if schedule.name != "constant" and schedule.total_steps is None and before != now:
        lines.append(
            f"note   trainer.max_steps changed from {before} to {now}, and the schedule follows it: the learning rate "
            f"continues as in a run of {now} steps. Set schedule.total_steps={before} to keep the old schedule"
        )
    mixture = config.data.chosen_mixture
    if mixture.follows_max_steps and before != now:
        what = "phases follow" if mixture.pace is None else "order follows"
        lines.append(
            f"note   trainer.max_steps changed from {before} to {now}, and data.mixture's {what} it. Set "
            f"data.mixture.total_steps={before} to keep them"
        )
    if config.precision.phases and before != now:
        lines.append(
            f"note   trainer.max_steps changed from {before} to {now}, and precision.phases follow it: they begin and "
            "end at other steps than before"
        )
    return lines


def branch_lines(config: Config, start: Start) -> list[str]:
    """Return the lines at the start of a branch: parent run, changed keys, effects on learning rate and data."""
    checkpoint, parent = start.checkpoint, start.parent
    if checkpoint is None or parent is None:
        return []
    updates = checkpoint.step - int(checkpoint.progress["skipped_steps"])
    return [
        f"branch from step {checkpoint.step} of {parent.trainer.max_steps} to {config.trainer.max_steps}: "
        f"{checkpoint.folder}",
        f"branch changes {'; '.join(_changes(parent, config)) or 'nothing'}",
        *_rate_lines(parent, config, updates),
        *_data_lines(parent, config, checkpoint.step),
    ]


def _changes(parent: Config, config: Config) -> Iterator[str]:
    """Yield the changes: a group with another name by its names, other changes key by key."""
    changed = changed_keys(parent, config)
    renamed = [key.removesuffix(".name") for key in changed if key.endswith(".name") and key.count(".") == 1]
    for group in renamed:
        before, after = changed[f"{group}.name"]
        yield f"{group} {before} -> {after}"
    for key, (before, after) in changed.items():
        if key.partition(".")[0] not in renamed:
            yield f"{key} {_shown(before)} -> {_shown(after)}"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _rate_lines(parent: Config, config: Config, updates: int) -> Iterator[str]:
    """Yield a note if the learning rate of the next update differs from the parent run's."""

    def rate(each: Config) -> float:
        schedule = each.schedule.relative_to(each.optim.learning_rate)
        return each.optim.learning_rate * learning_rate_factor(schedule, updates, each.trainer.max_steps)

    before, after = rate(parent), rate(config)
    if before != after:
        yield f"note   the learning rate of the next update is {after:.4g}, in the parent run {before:.4g}"


def _data_lines(parent: Config, config: Config, step: int) -> Iterator[str]:
    """Yield a note for each source that does not continue where the parent run left it."""
    drawn = []
    if any(each.data.chosen_mixture.shares_by_tokens for each in (parent, config)):
        return  # unknown until documents are chosen
    for each in (parent, config):
        width = each.data.global_batch_size
        mixture: Mixture = each.data.chosen_mixture.build(each.data.trained_weights, width, each.trainer.max_steps)
        drawn.append(dict(zip(mixture.names, mixture.drawn(step * width), strict=True)))
    before, after = drawn
    for name in sorted(after):
        if name in before and after[name] != before[name]:
            yield (
                f"note   data.sources.{name}: the parent run has used {before[name]:,} sequences by step {step}, but "
                f"this mixture counts {after[name]:,}: some are repeated or skipped in this epoch"
            )


def _end_lines(start: Start, before: int, now: int) -> list[str]:
    """Return notes for a run that ends at the resumed step, or earlier than planned `before`."""
    if start.step == now:
        return [f"note   trainer.max_steps={now} is already reached: the run ends without another step"]
    if now < before:
        return [f"note   trainer.max_steps changed from {before} to {now}: the run ends at step {now}"]
    return []
