"""Install packages that the machine lacks from a folder of wheels, without network access."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

FOLDERS = ("carry/wheels", "carry")
"""Default folder of wheels in a checkout; ignored by git."""
INSTALL_SECONDS = 120


def wheel_folder(given: str | None, root: Path) -> Path | None:
    """Return the folder of wheels: the given one, else GPU_CHECK_WHEELS, else the checkout's; None without any."""
    named = given or os.environ.get("GPU_CHECK_WHEELS")
    candidates = [Path(named)] if named else [root / folder for folder in FOLDERS]
    return next((folder for folder in candidates if any(folder.glob("*.whl"))), None)


def install(folder: Path) -> tuple[Path | None, str]:
    """Install all wheels of `folder` into a separate folder; return (folder or None, reason of a failure).

    It uses one pip call: Transformer Engine's wheels share a package, which a second call with --target would replace.
    """
    wheels = sorted(folder.glob("*.whl"))
    names = "".join(f"{wheel.name} {wheel.stat().st_size}\n" for wheel in wheels) + sys.version
    site = Path(tempfile.gettempdir(), f"gpu-check-{sha256(names.encode()).hexdigest()[:12]}")
    done = site / ".installed"
    if done.exists():
        return site, f"{len(wheels)} wheels of {folder}, installed earlier"
    shutil.rmtree(site, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile",
               "--no-cache-dir", "--disable-pip-version-check", "--target", str(site), *map(str, wheels)]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines() or ["no word of why"]
        return None, f"the wheels of {folder} could not be installed: {said[-1]}"
    done.touch()
    return site, f"{len(wheels)} wheels of {folder}"


def lacking(modules: tuple[str, ...]) -> list[str]:
    """Return those of `modules` that this Python cannot find."""
    return [name for name in modules if importlib.util.find_spec(name) is None]
