"""The machine: its device and versions, and the packages that it lacks, installed from a folder of wheels.

`python -m gpu_check.machine` prints device and versions as JSON.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightning_llm.base.hardware import has_nvidia_driver

PROBE_SECONDS = 60.0
DRIVER = "/proc/driver/nvidia/version"


@dataclass(frozen=True)
class Machine:
    """Device and versions that rows depend on. Rows of another machine or version are ignored."""

    device: str
    driver: str
    torch: str
    transformer_engine: str | None

    @property
    def file_part(self) -> str:
        """The device's name as part of a file name, e.g. "nvidia-h100-80gb-hbm3"."""
        return "-".join(self.device.lower().split())


def machine_here(environment: dict[str, str]) -> Machine | str:
    """Return this machine as seen by a process with `environment`, or the reason why there is no GPU to check.

    It runs in a separate process, so that the parent never initializes CUDA and survives a broken driver.
    """
    if not has_nvidia_driver():
        return "this machine has no NVIDIA driver"
    command = [sys.executable, "-m", "gpu_check.machine"]
    try:
        done = subprocess.run(
            command, env=environment, cwd=Path(__file__).parents[1], capture_output=True, text=True,
            timeout=PROBE_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"torch did not say within {PROBE_SECONDS:g} s what device there is"
    if done.returncode:
        return f"torch could not be asked: {(done.stderr.strip().splitlines() or ['without a word'])[-1][:300]}"
    said = json.loads(done.stdout.splitlines()[-1])
    return said["problem"] if "problem" in said else Machine(**said)


def probe() -> dict[str, str | None]:
    """Return the fields of `Machine`, as seen by torch, or {"problem": reason}."""
    import torch

    if not torch.cuda.is_available():
        return {"problem": f"torch {torch.__version__} finds no CUDA device"}
    return asdict(Machine(torch.cuda.get_device_name(0), driver_version(), torch.__version__, _engine()))


def driver_version() -> str:
    """Return the version of the NVIDIA driver, from its file or nvidia-smi; "unknown" if neither has it."""
    if Path(DRIVER).is_file():
        words = Path(DRIVER).read_text().partition("\n")[0].split()
        if found := [word for word in words if word[0].isdigit() and "." in word]:
            return found[0]
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _engine() -> str | None:
    try:
        return version("transformer-engine")
    except PackageNotFoundError:
        return None


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


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # it takes no arguments
    print(json.dumps(probe()))
