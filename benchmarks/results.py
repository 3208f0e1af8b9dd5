"""Result files, one per benchmark and day: rows with the machine, versions and the load at the start."""

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks import rotation
from benchmarks.rotation import Row
from lightning_llm.base.hardware import device_name

FOLDER = Path(__file__).parent / "results"
NAMED = re.compile(r"(?P<day>\d{4}-\d\d-\d\d)-(?P<device>.+)-(?P<name>[a-z0-9_]+)")
PROGRAMS = ("torch", "lightning", "transformers", "accelerate", "litgpt", "mlflow")


@dataclass(frozen=True)
class Result:
    """Result of one benchmark. `beside`: load average of the last minute at its start.

    `file`: name of its file in `results/`, if it has one.
    """

    name: str
    day: str
    machine: str
    rows: Sequence[Row]
    versions: dict[str, str] | None = None
    clock: str | None = None
    beside: float | None = None
    file: str = ""

    @property
    def command(self) -> str:
        """Command that repeats it."""
        words = f"--cpu-time {self.name}" if self.clock == "cpu" else self.name
        return f'make bench ARGS="{words}"' if " " in words else f"make bench ARGS={words}"


def here(name: str, rows: Sequence[Row], beside: float) -> Result:
    """Return rows measured now, in this process."""
    machine = f"{device_name(torch.device('cpu'))}, {platform.machine()}, {torch.get_num_threads()} threads"
    clock = "cpu" if rotation.by_cpu_time() else "wall"
    return Result(name, str(date.today()), machine, rows, _versions(), clock, round(beside, 1))


def load() -> float:
    """Return the load average of the last minute."""
    return os.getloadavg()[0]


def write(result: Result, folder: Path = FOLDER) -> Path:
    """Write the file of a result, replacing one of the same day."""
    folder.mkdir(exist_ok=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    file = folder / f"{result.day}-{device.replace(' ', '-').lower()}-{result.name}.json"
    content = {key: value for key, value in asdict(result).items() if key != "file"}
    file.write_text(json.dumps(content, indent=1) + "\n")
    return file


def newest(name: str, folder: Path = FOLDER) -> Result | None:
    """Return the last result of the benchmark of that name, None if there is none."""
    found = [match for file in folder.glob("*.json") if (match := NAMED.fullmatch(file.stem)) and match["name"] == name]
    if not found:
        return None
    last = max(found, key=lambda match: match["day"])
    content = json.loads((folder / f"{last.string}.json").read_text())
    rows = [(str(what), value, str(target)) for what, value, target in content["rows"]]
    given = {key: content.get(key) for key in ("versions", "clock", "beside")}
    return Result(name, last["day"], content["machine"], rows, file=f"{last.string}.json", **given)


def _versions() -> dict[str, str]:
    found = {}
    for program in PROGRAMS:
        try:
            found[program] = version(program)
        except PackageNotFoundError:
            continue
    return found
