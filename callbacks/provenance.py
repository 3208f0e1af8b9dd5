"""Which code a run came from, and which process."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

import lightning_llm
from lightning_llm.workspace import checkout

RECORDED_PACKAGES = ("torch", "lightning", "mlflow", "transformer-engine")


def versions() -> dict[str, str]:
    """Return {package: version} of what shapes a run's numbers; packages that are not installed are left out."""
    found = {"python": platform.python_version(), "lightning_llm": lightning_llm.__version__}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any]:
    """Return {"sha", "dirty"} of the checkout the package runs from; both None for a wheel, or without git."""
    root = checkout()
    sha = _git(root, "rev-parse", "HEAD") if root else None
    status = _git(root, "status", "--porcelain") if sha else None
    return {"sha": sha, "dirty": None if status is None else bool(status)}


def process_mark() -> str:
    """Return a name of this process that no later one gets: host, number, and when it was started (seconds)."""
    return f"{platform.node()} {os.getpid()} {psutil.Process().create_time():.0f}"


def has_ended(mark: str) -> bool:
    """Return whether the process of `mark` is known to be gone; False for one of another machine, or for no mark."""
    host, _, rest = mark.partition(" ")
    number, _, started = rest.partition(" ")
    if host != platform.node() or not number.isdigit():
        return False
    try:
        process = psutil.Process(int(number))
        # Boot time, and with it this number, may move by a second when the clock is set.
        return abs(process.create_time() - float(started)) > 2 or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _git(root: Any, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
