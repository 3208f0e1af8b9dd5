"""Description of the machine that rows are measured on. `python -m gpu_check.machine` prints it as JSON."""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightning_llm.precision.native.decide import DRIVER_FILES

PROBE_SECONDS = 60.0
DRIVER = "/proc/driver/nvidia/version"


@dataclass(frozen=True)
class Machine:
    """Identity of the device and versions that rows depend on; rows of other machines or versions are not used."""

    device: str
    driver: str
    torch: str
    transformer_engine: str | None

    @property
    def file_part(self) -> str:
        """The device's name for file names."""
        return "-".join(self.device.lower().split())


def has_driver() -> bool:
    """Return whether there is an NVIDIA driver, without torch."""
    return any(Path(file).exists() for file in DRIVER_FILES)


def machine_here(environment: dict[str, str]) -> Machine | str:
    """Return this machine as seen by a process with `environment`, or the reason why there is no GPU to check.

    It runs in a separate process, so that the parent never initializes CUDA and survives a broken driver.
    """
    if not has_driver():
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
    """Return the fields of `Machine` from torch, or a `problem`."""
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


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # it takes no arguments
    print(json.dumps(probe()))
