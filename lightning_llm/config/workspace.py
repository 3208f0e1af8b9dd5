"""Folders that a command uses, and commands that the program prints for users to paste, quoted for a shell.

The folder of all runs does not depend on the working directory. In `--config-dir DIR`, `DIR/callbacks/mine.py` is the
module `config_dir.callbacks.mine`; `sources` reads the YAML files. Passing the folder on the command line permits
running its code. A preset by itself imports only installed code. Printed commands pass the same `--config-dir`.
"""

import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from shutil import which

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.process import python_module

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package `lightning_llm`."""
OUTPUTS_VARIABLE = "LIGHTNING_LLM_OUTPUTS"
CONFIG_DIR_PACKAGE = "config_dir"


def checkout() -> Path | None:
    """Return the root of the source checkout that this package runs from; None for an installed wheel."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() and (root / "recipes").is_dir() else None


def default_outputs() -> str:
    """Return the folder of all runs: LIGHTNING_LLM_OUTPUTS, the checkout's outputs/, or ~/lightning-llm/outputs."""
    if os.environ.get(OUTPUTS_VARIABLE):
        return str(Path(os.environ[OUTPUTS_VARIABLE]).expanduser().absolute())
    return possible_outputs()[0]


def possible_outputs() -> list[str]:
    """Return the default folders of runs: that of the checkout, if any, and that of an installed wheel."""
    root = checkout()
    return [*([str(root / "outputs")] if root else []), str(Path.home() / "lightning-llm" / "outputs")]


def folders_named(word: str, root: Path) -> list[Path]:
    """Return the existing folders that `word` names: a path, an experiment below `root`, or SWEEP or SWEEP/N there.

    The first of these that exists counts; a sweep of that name may be in several experiments.
    """
    for path in (Path(word).expanduser(), root / word):
        if path.is_dir():
            return [path]
    return [path for each in sorted(root.iterdir()) if (path := each / word).is_dir()] if root.is_dir() else []


def same_folder(one: Path, other: Path) -> bool:
    """Return whether two paths are the same folder, also through links or mounts; missing ones are compared by name."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return os.path.realpath(one) == os.path.realpath(other)


def open_config_dir(folder: Path | None) -> None:
    """Let `_target_: config_dir.callbacks.FILE.Class` import classes from `folder`; None: undo an earlier call.

    Raises:
        ConfigError: it is not a folder.
    """
    if CONFIG_DIR_PACKAGE in sys.modules:
        for name in [each for each in sys.modules if each.partition(".")[0] == CONFIG_DIR_PACKAGE]:
            del sys.modules[name]
    if folder is None:
        return
    if not folder.is_dir():
        raise ConfigError(Problem("--config-dir", f"is {folder}, not a folder. Give a folder with config groups."))
    spec = ModuleSpec(CONFIG_DIR_PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(folder.absolute())]
    sys.modules[CONFIG_DIR_PACKAGE] = module_from_spec(spec)
    importlib.invalidate_caches()


def config_dir_arguments() -> list[str]:
    """Return the arguments `--config-dir DIR` of the open folder, for a child process (rank, job); [] without one."""
    module = sys.modules.get(CONFIG_DIR_PACKAGE)
    return ["--config-dir", *module.__path__] if module else []


def command(*arguments: str) -> str:
    """Return the shell command that runs this program with `arguments`, a verb and its arguments."""
    return shlex.join([*program("lightning-llm", "lightning_llm"), *arguments])


def program(name: str, module: str) -> list[str]:
    """Return how to call the program `name` of this Python installation: [name] if PATH finds it, else its path.

    If it is not installed, the command that runs `module`.
    """
    beside = Path(sys.executable).parent / name
    on_path = which(name)
    if on_path and Path(on_path).absolute() == beside.absolute():
        return [name]
    return [str(beside)] if beside.is_file() else python_module(module)


def resume_command(run_dir: str | Path, *overrides: str) -> str:
    """Return the command that resumes the run in `run_dir` from its newest checkpoint."""
    config = Path(run_dir).absolute() / "config.yaml"
    return command("train", *config_dir_arguments(), "--config", str(config), "resume=auto", *overrides)


def resume_elsewhere_command(checkpoint: Path, run_dir: Path, max_steps: int) -> str:
    """Return the command that continues from `checkpoint` of the run in `run_dir` to `max_steps` in a new folder."""
    arguments = [f"resume={checkpoint.absolute()}", "run.name=NEW", f"trainer.max_steps={max_steps}"]
    return command("train", *config_dir_arguments(), "--config", str(run_dir.absolute() / "config.yaml"), *arguments)


def how_to_resume(run_dir: str | Path) -> str:
    """Return a hint ("to resume: COMMAND") for a run that ended before its last step; "" if it had not begun."""
    if not (Path(run_dir) / "config.yaml").is_file():
        return ""
    return f"{'to resume' if _is_saved(run_dir) else 'to start it again'}: {resume_command(run_dir)}"


def how_to_extend(run_dir: str | Path, step: int) -> str:
    """Return a text that the run has finished at `step`, with the command that doubles its steps.

    The command is omitted if the run has no checkpoint to continue from.
    """
    if not _is_saved(run_dir):
        return f"{run_dir} is finished at step {step}"
    further = resume_command(run_dir, f"trainer.max_steps={2 * step}")
    return f"{run_dir} is finished at step {step}; to double its steps: {further}"


def sync_command(*folders: str | Path) -> str:
    """Return the command that uploads data that MLflow lacks of the runs or sweeps in `folders`."""
    return command("sync", *dict.fromkeys(str(Path(folder).absolute()) for folder in folders))


def sweep_command(
    overrides: Sequence[str], config_dir: str | Path | None = None, folder: str | Path | None = None
) -> str:
    """Return the command that starts or resumes the sweep of these `overrides`.

    `folder`: working directory in which to run it, if its overrides have relative paths.
    """
    groups = ["--config-dir", str(config_dir)] if config_dir else []
    whole = command("train", "-m", *groups, *overrides)
    return f"{shlex.join(['cd', str(folder)])} && {whole}" if folder else whole


def _is_saved(run_dir: str | Path) -> bool:
    return any((Path(run_dir) / "checkpoints").glob("step=*"))
