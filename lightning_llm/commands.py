"""Commands that the program prints for people to paste, quoted for a shell. Imports no torch."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import which


def command(*words: str) -> str:
    """Return a command of this program; `words` are its verb and what follows."""
    return shlex.join([*program("lightning-llm", "lightning_llm"), *words])


def program(name: str, module: str) -> list[str]:
    """Return how a shell starts the program `name` of this Python: by name where PATH has that very one."""
    beside = Path(sys.executable).parent / name
    on_path = which(name)
    if on_path and Path(on_path).absolute() == beside.absolute():
        return [name]
    return [str(beside)] if beside.is_file() else [sys.executable, "-m", module]


def resume_command(run_dir: str | Path, *overrides: str) -> str:
    """Return the command that goes on with the run in `run_dir` from its newest checkpoint."""
    return command("train", "--config", str(Path(run_dir).absolute() / "config.yaml"), "resume=auto", *overrides)


def sync_command(folder: str | Path) -> str:
    """Return the command that hands in to MLflow what it missed of the runs in `folder`."""
    return command("sync", str(Path(folder).absolute()))


def sweep_command(overrides: Sequence[str], config_dir: str | Path | None = None) -> str:
    """Return the command that starts, or goes on with, the sweep of these overrides."""
    groups = ["--config-dir", str(config_dir)] if config_dir else []
    return command("train", "-m", *groups, *overrides)
