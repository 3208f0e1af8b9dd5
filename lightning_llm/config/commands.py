"""Commands that the program prints for users to paste, quoted for a shell. Imports no torch."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which

from lightning_llm.base.interpreter import python_module
from lightning_llm.config.workspace import config_dir_arguments


def command(*arguments: str) -> str:
    """Return a command of this program; `arguments` are the verb and its arguments."""
    return shlex.join([*program("lightning-llm", "lightning_llm"), *arguments])


def program(name: str, module: str) -> list[str]:
    """Return the shell command of the program `name` of this Python: its name if PATH leads to it, else its path."""
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


def how_to_go_on(run_dir: str | Path) -> str:
    """Return the hint for a run that ended before its last step; "" if it had not begun."""
    if not (Path(run_dir) / "config.yaml").is_file():
        return ""
    return f"{'to resume' if _is_saved(run_dir) else 'to start it again'}: {resume_command(run_dir)}"


def how_to_go_further(run_dir: str | Path, step: int) -> str:
    """Return the hint for a run that has finished its last step, `step`; it can continue if it has a checkpoint."""
    if not _is_saved(run_dir):
        return f"{run_dir} is finished at step {step}"
    further = resume_command(run_dir, f"trainer.max_steps={2 * step}")
    return f"{run_dir} is finished at step {step}; to double its steps: {further}"


def sync_command(*folders: str | Path) -> str:
    """Return the command that uploads missing records of the runs in `folders` to MLflow, without duplicates."""
    return command("sync", *dict.fromkeys(str(Path(folder).absolute()) for folder in folders))


def sweep_command(
    overrides: Sequence[str], config_dir: str | Path | None = None, folder: str | Path | None = None
) -> str:
    """Return the command that starts or resumes the sweep of these overrides, in `folder` if given."""
    groups = ["--config-dir", str(config_dir)] if config_dir else []
    whole = command("train", "-m", *groups, *overrides)
    return f"{shlex.join(['cd', str(folder)])} && {whole}" if folder else whole


def _is_saved(run_dir: str | Path) -> bool:
    return any((Path(run_dir) / "checkpoints").glob("step=*"))
