"""Commands that go on with a sweep in its folder, or grow it. Imports no torch."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.commands import sweep_command
from lightning_llm.config.redact import redact_uri
from lightning_llm.config.workspace import default_outputs
from lightning_llm.tracking.sweep_definition import Sweep, Typed, key_of
from lightning_llm.tracking.sweep_file import DESIGN, read_sweep_file


def command_with_seeds(folder: Path, seeds: Iterable[int]) -> str:
    """Return the command that runs the sweep in `folder` with `seeds`, in the same folder, repeating no finished job.

    A sweep that grew by other overrides under one name has a command for each, joined by " && ". "" where its
    `sweep.json` says nothing of how it was composed (written by an earlier version), or cannot be read.
    """
    return _command_adding(folder, seeds, {})


def command_with_values(folder: Path, key: str, values: Iterable[float], seeds: Iterable[int]) -> str:
    """Return the command that adds jobs of other `values` of `key` to the sweep in `folder`, at its `seeds`.

    As `command_with_seeds`.
    """
    return _command_adding(folder, seeds, {key: ",".join(f"{value:g}" for value in values)})


def command_for_the_rest(folder: Path) -> str:
    """Return the command that runs what is left of the sweep in `folder`, "" where there is none.

    Of a sweep that looks at seeds as it goes, with all that its looks may need.
    """
    known = _readable(folder)
    looked_at = known.get(DESIGN, {}).get("seeds", [])
    seeds = [*looked_at, *(job["seed"] for job in known.get("jobs", []) if "seed" in job)]
    return command_with_seeds(folder, seeds) if seeds else ""


def _command_adding(folder: Path, seeds: Iterable[int], choices: Mapping[str, str]) -> str:
    in_folder = [f"{key}={value}" for key, value in choices.items()]
    in_folder += [f"seed={','.join(map(str, sorted(set(seeds))))}", *_folder_overrides(folder)]
    return " && ".join(
        sweep_command(
            [*(word for word in each["overrides"] if key_of(word) not in choices), *in_folder],
            each["config_dir"],
            each.get("folder"),
        )
        for each in _readable(folder).get("typed", [])
    )


def _readable(folder: Path) -> dict[str, Any]:
    try:
        return read_sweep_file(folder)
    except ConfigError:  # whoever asks for a command has said so, of the jobs
        return {}


def command_to_go_on(sweep: Sweep) -> str:
    """Return the command that starts what is left of `sweep`, wherever it is typed."""
    typed = sweep.typed or Typed()
    words = [redact_uri(word) for word in typed.overrides if key_of(word) not in ("run.name", "run.root", "run.dir")]
    config_dir = typed.config_dir and typed.config_dir.absolute()
    return sweep_command([*words, *_folder_overrides(sweep.folder)], config_dir, typed.only_from)


def _folder_overrides(folder: Path) -> list[str]:
    """Return the overrides that lead to the folder of a sweep from anywhere."""
    root = folder.absolute().parent.parent
    return [f"run.name={folder.name}", *([] if str(root) == default_outputs() else [f"run.root={root}"])]
