"""Provenance of a run: its code, and its process."""

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

from lightning_llm.base.version import __version__
from lightning_llm.config.workspace import PACKAGE, checkout

RECORDED_PACKAGES = ("torch", "lightning", "mlflow", "transformer-engine")
FINGERPRINT = "fingerprint"
"""The key of summary.json that says what of the machine and its libraries has a part in the numbers."""


def versions() -> dict[str, str]:
    """Return {package: version} of what shapes a run's numbers; packages that are not installed are left out."""
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
    """Return {"sha", "dirty"} of the checkout the package runs from; both None for a wheel, or without git.

    As they are when a process asks first, as `code_hash` is.
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
    """Return 12 hex digits of the Python text that training runs, in a checkout or a wheel.

    As it is on disk when a process asks first: what is changed there later, the process has not loaded.
    """
    files = {file.relative_to(PACKAGE).as_posix(): file for file in PACKAGE.rglob("*.py")}
    if root := checkout():  # which keeps callbacks/ beside the package
        files |= {file.relative_to(root).as_posix(): file for file in (root / "callbacks").rglob("*.py")}
    digest = blake2b(digest_size=6)
    for name, file in sorted(files.items()):
        if not name.startswith(("compare/", "ladder/")):  # which judge runs and take no part in them
            digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def origin_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `summary.json` says of where a run's numbers come from, flat; what was not recorded is left out."""
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
        found["init_digest"] = summary["init"]["digest"]  # of the weights that the run started from
    if teachers := summary.get("distil"):
        found["teachers"] = ", ".join(str(each.get("digest")) for each in teachers)
    branch = summary.get("branch") or {}
    found |= {f"branch.{key}": branch[key] for key in ("digest", "step") if branch.get(key) is not None}
    return found if "code_hash" in found else found | git_of(summary)


def has_fingerprint(origin: Mapping[str, Any]) -> bool:
    """Return whether what `origin_of` returned has a fingerprint: runs of earlier releases have none."""
    return any(key.startswith(f"{FINGERPRINT}.") for key in origin)


def origin_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {key: (before, now)} of what differs between two `origin_of`, None where one has none.

    Of the fingerprint, where both have one, all that either has; of the rest what both have recorded.
    """
    keys = before.keys() & now.keys()
    if has_fingerprint(before) and has_fingerprint(now):
        keys = keys | {key for key in before.keys() | now.keys() if key.startswith(f"{FINGERPRINT}.")}
    return {key: (before.get(key), now.get(key)) for key in sorted(keys) if before.get(key) != now.get(key)}


def git_of(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the commit that `summary.json` names and whether files were changed, flat; {} where it says nothing."""
    git = summary.get("git") or {}
    return {f"git.{key}": git[key] for key in ("sha", "dirty") if git.get(key) is not None}


def user_name() -> str:
    """Return who runs this, as MLflow's column of users shows; the number of one that has no name here."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without an entry in /etc/passwd
        return str(os.getuid())


def process_mark() -> str:
    """Return a name of this process that no later one gets: host, number, and when it was started (seconds)."""
    return f"{platform.node()} {os.getpid()} {psutil.Process().create_time():.0f}"


def is_of_this_machine(fingerprint: str) -> bool:
    """Return whether the process of `fingerprint` is, or was, one of this machine; no fingerprint is of none."""
    return fingerprint.partition(" ")[0] == platform.node()


def has_ended(fingerprint: str) -> bool:
    """Return whether the process of `fingerprint` is known to be gone; False for another machine's, or for none."""
    number, _, started = fingerprint.partition(" ")[2].partition(" ")
    if not is_of_this_machine(fingerprint) or not number.isdigit():
        return False
    try:
        process = psutil.Process(int(number))
        # Boot time, and with it this number, may move by a second when the clock is set.
        return abs(process.create_time() - float(started)) > 2 or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def send_signal(fingerprint: str, number: int) -> bool:
    """Send a signal to the process of `fingerprint`; return whether there is one on this machine that takes it."""
    if not is_of_this_machine(fingerprint) or has_ended(fingerprint):
        return False
    try:
        os.kill(int(fingerprint.split()[1]), number)
    except (ProcessLookupError, PermissionError):  # it has ended since, or is another user's
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
