"""Whether a run that is to go on can, as `train` decides it and `plan` says it beforehand. Imports no torch."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.compose import typed_value
from lightning_llm.config.config_hash import differences_on_resume
from lightning_llm.config.from_file import load_config
from lightning_llm.config.schema import Config
from lightning_llm.run.resume.start import Start, decide_start, first_start
from lightning_llm.run.resume.start_lines import resume_lines
from lightning_llm.run.resume.trunk import look_once
from lightning_llm.tracking.run_state import state_of
from lightning_llm.train.checkpoint.manifest import step_folders

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
