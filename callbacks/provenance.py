"""Which code a run came from."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

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


def _git(root: Any, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
