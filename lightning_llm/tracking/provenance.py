"""Provenance of a run: its code, the versions of packages, and its process."""

import getpass
import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import psutil

from lightning_llm.base import __version__
from lightning_llm.config.workspace import PACKAGE, checkout

RECORDED_PACKAGES = ("torch", "lightning", "mlflow", "transformer-engine")
FINGERPRINT = "fingerprint"
"""Key of summary.json with the properties of machine and libraries that influence the numbers."""


def versions() -> dict[str, str]:
    """Return {package: version} of installed packages that influence a run's numbers."""
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "lightning_llm": __version__}
    for package in RECORDED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any]:
    """Return {"sha": commit, "dirty": whether files differ} of the checkout that the package runs from.

    Both are None for a wheel or without git. The result of the first call in a process is kept, as for `code_hash`.
    """
    return dict(_git_state())


@cache
def _git_state() -> dict[str, Any]:
    root = checkout()
    sha = _git(root, "rev-parse", "HEAD") if root else None
    status = _git(root, "status", "--porcelain") if sha else None
    return {"sha": sha, "dirty": None if status is None else bool(status)}


@cache
def code_hash() -> str:
    """Return a hash (12 hex digits) of the Python source used in training, in a checkout or a wheel.

    The result of the first call in a process is kept: later changes on disk are not loaded by the process.
    """
    files = {file.relative_to(PACKAGE).as_posix(): file for file in PACKAGE.rglob("*.py")}
    if root := checkout():  # with callbacks/ next to the package
        files |= {file.relative_to(root).as_posix(): file for file in (root / "callbacks").rglob("*.py")}
    digest = blake2b(digest_size=6)
    for name, file in sorted(files.items()):
        if not name.startswith(("compare/", "ladder/")):  # these only judge runs
            digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def origin_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return {flat key: value} of the facts in `summary.json` that influence a run's numbers (code, versions, ...)."""
    found = {f"versions.{key}": value for key, value in (summary.get("versions") or {}).items() if key != "mlflow"}
    if isinstance(summary.get("device"), str):
        name = summary["device"].rpartition(",")[0] or summary["device"]  # "2 x NVIDIA H100, 80 GiB"
        count, times, rest = name.partition(" x ")
        found["device"] = rest if times and count.isdigit() else name
    found |= {f"{FINGERPRINT}.{key}": value for key, value in (summary.get(FINGERPRINT) or {}).items()}
    for key in ("data_hash", "validation_hash", "code_hash", "threads", "compiled", "backend", "skipped_samples"):
        if summary.get(key) is not None:
            found[key] = summary[key]
    if (summary.get("init") or {}).get("digest"):
        found["init_digest"] = summary["init"]["digest"]  # digest of the initial weights
    if teachers := summary.get("distil"):
        found["teachers"] = ", ".join(str(each.get("digest")) for each in teachers)
    branch = summary.get("branch") or {}
    found |= {f"branch.{key}": branch[key] for key in ("digest", "step") if branch.get(key) is not None}
    return found if "code_hash" in found else found | git_of(summary)


def has_fingerprint(origin: Mapping[str, Any]) -> bool:
    """Return whether `origin`, a result of `origin_of`, has a fingerprint; earlier releases recorded none."""
    return any(key.startswith(f"{FINGERPRINT}.") for key in origin)


def origin_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {key: (before, now)} of the differences between two results of `origin_of`.

    Keys of the fingerprint are compared if both have one, with None for a missing key; other keys if both have them.
    """
    keys = before.keys() & now.keys()
    if has_fingerprint(before) and has_fingerprint(now):
        keys = keys | {key for key in before.keys() | now.keys() if key.startswith(f"{FINGERPRINT}.")}
    return {key: (before.get(key), now.get(key)) for key in sorted(keys) if before.get(key) != now.get(key)}


def git_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded commit of a run and whether files differed from it, as flat keys; {} if not recorded."""
    git = summary.get("git") or {}
    return {f"git.{key}": git[key] for key in ("sha", "dirty") if git.get(key) is not None}


def user_name() -> str:
    """Return the user's name for MLflow; the user id if it has no name here."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without an entry in /etc/passwd
        return str(os.getuid())


def process_mark() -> str:
    """Return a unique name of this process for summaries: "HOST PID START", with its start time in seconds."""
    return f"{platform.node()} {os.getpid()} {psutil.Process().create_time():.0f}"


def is_of_this_machine(fingerprint: str) -> bool:
    """Return whether the process named `fingerprint` (by `process_mark`) is or was on this machine; False for ""."""
    return fingerprint.partition(" ")[0] == platform.node()


def has_ended(fingerprint: str) -> bool:
    """Return whether the process named `fingerprint` is known to have ended; False for other machines and for ""."""
    number, _, started = fingerprint.partition(" ")[2].partition(" ")
    if not is_of_this_machine(fingerprint) or not number.isdigit():
        return False
    try:
        process = psutil.Process(int(number))
        # The boot time, and so the start time, may shift by a second when the clock is set.
        return abs(process.create_time() - float(started)) > 2 or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def send_signal(fingerprint: str, number: int) -> bool:
    """Send the signal `number` to the process named `fingerprint`; return False if it is not on this machine."""
    if not is_of_this_machine(fingerprint) or has_ended(fingerprint):
        return False
    try:
        os.kill(int(fingerprint.split()[1]), number)
    except (ProcessLookupError, PermissionError):  # it has ended in the meantime, or belongs to another user
        return False
    return True


def _git(root: Any, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
