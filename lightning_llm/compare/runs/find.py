"""Find the folders of runs that the RUN arguments of the command line name."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean, gathered
from lightning_llm.config.redact import redacted
from lightning_llm.config.weight_folders import TOKENIZER
from lightning_llm.config.workspace import command, default_outputs, folders_named, possible_outputs
from lightning_llm.tracking.mlflow.store import all_runs, existing_store, sqlite_address
from lightning_llm.tracking.sweep_file import FILE

RUN_ID = re.compile(r"[0-9a-f]{32}")
FOLDER_TAGS = ("sweep_folder", "run_dir")
"""MLflow tags: of a sweep's parent (all of its jobs are then used), and of a run."""
ARTIFACTS = "mlartifacts"
"""MLflow's own folder, with copies of runs' files."""
MOST_ELSEWHERE = 3
"""Maximum number of sweeps in other folders that a message lists."""
RUN_FILES = ("config.yaml", "metrics.jsonl")
"""Files that identify the folder of a run: a run that lost its config is damaged, not absent."""
DEPTH = 3
"""Maximum depth of runs below a named folder: outputs/EXPERIMENT/SWEEP/N."""


@dataclass
class RunSelection:
    """The runs that arguments name: `folders` of the runs, and `sweeps`, folders of sweeps that were named as a whole.

    `problems`: of the arguments; `home`: the folder for a report on these runs.
    """

    folders: list[Path] = field(default_factory=list)
    sweeps: list[Path] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    home: Path = Path()


def find_runs(arguments: Sequence[str]) -> RunSelection:
    """Return the runs named by `arguments`: folders of or above runs, experiments, sweeps, SWEEP/N, MLflow ids.

    Without arguments, those of the last sweep.

    Raises:
        ConfigError: nothing was found.
    """
    root = Path(default_outputs())
    found = RunSelection()
    above: list[Path] = []
    for word in arguments or [str(_newest_sweep(root))]:
        with gathered(found.problems):
            above += _folders_named(word, root, found)
    for folder in above:
        below = list(_runs_below(folder))
        if not below:
            found.problems.append(
                Problem(str(folder), "there is no run in this folder. Name a folder with a config.yaml.")
            )
        found.folders += below
        found.sweeps += [file.parent.resolve() for depth in range(DEPTH) for file in folder.glob("*/" * depth + FILE)]
    found.folders = list(dict.fromkeys(folder.resolve() for folder in found.folders))
    if not found.folders:
        raise ConfigError(found.problems)
    found.home = _home(above, found.folders)
    return found


def _home(above: list[Path], folders: list[Path]) -> Path:
    """Return the named folder if it is above runs, else the nearest common parent of the runs."""
    if len(above) == 1 and above[0].resolve() not in folders:
        return above[0].resolve()
    return Path(os.path.commonpath([folder.parent for folder in folders]))


def _runs_below(folder: Path) -> Iterator[Path]:
    if is_run(folder):
        yield folder
        return
    for depth in range(1, DEPTH + 1):
        files = (file for name in RUN_FILES for file in folder.glob("/".join(["*"] * depth) + f"/{name}"))
        runs = {file.parent for file in files if is_run(file.parent) and ARTIFACTS not in file.parts}
        yield from sorted(runs, key=_by_number)


def is_run(folder: Path) -> bool:
    """Return whether `folder` is a run's, also if it failed before its first record or lost its config."""
    return (folder / "metrics.jsonl").is_file() or ((folder / "config.yaml").is_file() and has_begun(folder))


def has_begun(folder: Path) -> bool:
    """Return whether a run left anything in `folder` besides its config."""
    return any((folder / name).is_file() for name in ("metrics.jsonl", "summary.json", TOKENIZER))


def _by_number(folder: Path) -> tuple[str, int, str]:
    return str(folder.parent), int(folder.name) if folder.name.isdigit() else -1, folder.name


def _newest_sweep(root: Path) -> Path:
    sweeps = {file.parent.parent for file in root.glob("*/*/*/config.yaml") if file.parent.name.isdigit()}
    if not sweeps:
        text = f"no run was named, and there is no sweep in {root}."
        if others := _sweeps_elsewhere(root):
            text += f" There are sweeps in other folders: {'; '.join(command('compare', str(each)) for each in others)}"
        else:
            text += " Name runs (of a sweep with run.root=DIR: compare DIR), or run one: lightning-llm train -m ..."
        raise ConfigError(Problem("RUN", text))
    return max(sweeps, key=lambda sweep: max(file.stat().st_mtime for file in sweep.glob("*/config.yaml")))


def _sweeps_elsewhere(root: Path) -> list[Path]:
    """Return the newest sweeps below the working folder and below the roots of other settings."""
    places = [Path.cwd(), *(Path(each) for each in possible_outputs())]
    files = {file.resolve() for each in places for depth in range(DEPTH + 1) for file in each.glob("*/" * depth + FILE)}
    newest = sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)
    found = [file.parent for file in newest if ARTIFACTS not in file.parts]  # MLflow keeps a copy of sweep.json
    return [sweep for sweep in found if root.resolve() not in sweep.parents][:MOST_ELSEWHERE]


def _folders_named(word: str, root: Path, found: RunSelection) -> list[Path]:
    """Return the folders that one word names; problems of missing folders are added to `found`.

    Raises:
        ConfigError: it names none, or MLflow would have to know and does not answer.
    """
    if RUN_ID.fullmatch(word) and not Path(word).is_dir():  # MLflow uses such names for folders below its artifacts
        known = [file.parent for file in _id_files(root) if file.read_text(encoding="utf-8").strip() == word]
        return known or _ask_mlflow(word, root, found)
    above = folders_named(word, root)
    if len(above) == 1:
        return above
    if len(above) > 1:
        places = ", ".join(str(each.relative_to(root)) for each in above)
        text = f"is the name of {len(above)} folders. Use one of: {places}."
        raise ConfigError(Problem(word, text))
    if known := _experiment_in_mlflow(word, root, found):
        return known
    folders = [path for path in root.iterdir() if path.is_dir() and path.name != ARTIFACTS] if root.is_dir() else []
    names = sorted(path.name for path in folders if any(_runs_below(path)))
    text = f"is no folder, no experiment or sweep in {root} or MLflow, and no MLflow run id.{did_you_mean(word, names)}"
    raise ConfigError(Problem(word, text))


def _id_files(root: Path) -> Iterable[Path]:
    for depth in range(1, DEPTH + 1):
        yield from root.glob("/".join(["*"] * depth) + "/mlflow_run_id")


def _store_of(root: Path) -> str:
    return os.environ.get("MLFLOW_TRACKING_URI") or sqlite_address(root / "mlflow.db")


def _experiment_in_mlflow(name: str, root: Path, found: RunSelection) -> list[Path]:
    """Return the existing folders of the runs of MLflow's experiment `name`; [] if it has none."""
    try:
        client = existing_store(_store_of(root))
        experiment = client.get_experiment_by_name(name)
        runs = list(all_runs(client, experiment.experiment_id)) if experiment else []
    except FileNotFoundError:
        return []
    except Exception as error:  # of many kinds: requests', sqlalchemy's, mlflow's own
        why = redacted(f"{type(error).__name__}: {error}".splitlines()[0])[:300]
        text = f"is no folder and no experiment or sweep in {root}, and MLflow could not be asked for it ({why}). "
        text += "Check MLflow, or name a folder."
        raise ConfigError(Problem(name, text)) from error
    return _folders_of(runs, found)


def _ask_mlflow(run_id: str, root: Path, found: RunSelection) -> list[Path]:
    """Return the folder in the run's tag `run_dir`; for a parent run, those of its children."""
    uri = _store_of(root)
    try:
        client = existing_store(uri)
        run = client.get_run(run_id)
        children = list(all_runs(client, run.info.experiment_id, f"tags.`mlflow.parentRunId` = '{run_id}'"))
    except FileNotFoundError:
        text = f"is no run in {root}, and there is no MLflow database {redacted(uri)}. Name the run's folder."
        raise ConfigError(Problem(run_id, text)) from None
    except Exception as error:  # of many kinds: requests', sqlalchemy's, mlflow's own
        why = redacted(f"{type(error).__name__}: {error}".splitlines()[0])[:300]
        text = f"MLflow at {redacted(uri)} could not be asked for this run ({why}). Check it, or name the run's folder."
        raise ConfigError(Problem(run_id, text)) from error
    named = [run, *children]
    if not any(tag in each.data.tags for each in named for tag in FOLDER_TAGS):
        text = "MLflow has no folder for this run, and verdicts require its metrics.jsonl. Name the run's folder."
        raise ConfigError(Problem(run_id, text))
    return _folders_of(named, found)


def _folders_of(runs: Iterable[Any], found: RunSelection) -> list[Path]:
    """Return the existing folders in the tags of runs and of sweeps' parents; problems of others go to `found`."""
    folders = []
    for run in runs:
        for folder in (Path(run.data.tags[tag]) for tag in FOLDER_TAGS if tag in run.data.tags):
            if folder.is_dir():
                folders.append(folder)
                continue
            text = f"its folder {folder} is missing or on another machine. Copy it here: verdicts read its files."
            found.problems.append(Problem(run.info.run_id, text))
    return folders
