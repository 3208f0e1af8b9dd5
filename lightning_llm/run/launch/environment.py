"""Rank of this process under torchrun or Slurm, and printing once for all ranks. Imports no torch."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.signals import die_with_parent

if TYPE_CHECKING:
    from lightning_llm.config.schema import Config  # imports pydantic, which is slow and not needed for --help

TORCHRUN = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world": "WORLD_SIZE", "local_world": "LOCAL_WORLD_SIZE"}
NO_RANK = {"rank": 0, "local_rank": 0, "world": 1, "local_world": 1}
"""Values that are also valid for a single process."""
INTERACTIVE_NAMES = ("bash", "zsh", "sh", "interactive")
"""Names of Slurm jobs that are interactive shells (two are from lightning.fabric.plugins.environments.slurm)."""
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Step numbers from here on are batch scripts and interactive shells, not srun."""


@dataclass(frozen=True)
class RankEnvironment:
    """Rank of this process in a run of `world` ranks, `local_world` of them on this machine."""

    rank: int
    local_rank: int
    world: int
    local_world: int


def rank_environment() -> RankEnvironment | None:
    """Return the rank given by the variables of torchrun or srun; None if there are none.

    Variables of srun are also set under torchrun's names. An empty variable counts as unset. A single process needs no
    variables.

    Raises:
        ConfigError: variables are missing or contradictory, so this process may be one of several ranks.
    """
    given = {field: value for field, name in TORCHRUN.items() if (value := os.environ.get(name, "").strip())}
    if len(given) < len(TORCHRUN) and _slurm_number("SLURM_NTASKS", 1) > 1 and _is_srun():
        return _from_slurm()
    if not given:
        return None
    numbers = {field: int(value) for field, value in given.items() if value.isdecimal()}
    if len(given) < len(TORCHRUN) and {field: NO_RANK[field] for field in given} == numbers:
        return None
    if problems := list(_variable_problems(given, numbers)):
        raise ConfigError(problems)
    return RankEnvironment(**numbers)


def _variable_problems(given: dict[str, str], numbers: dict[str, int]) -> Iterator[Problem]:
    """Yield the problems of torchrun's variables: their values `given`, and `numbers` if they are integers."""
    missing = [name for field, name in TORCHRUN.items() if field not in given]
    if missing:
        known = " ".join(f"{TORCHRUN[field]}={value}" for field, value in given.items())
        text = (
            f"not set, although {known} is set: it is unclear if this process is one of several ranks. Start ranks "
            "with torchrun (also in a Kubeflow PyTorchJob) or srun. With one rank per machine or pod, set LOCAL_RANK=0 "
            "LOCAL_WORLD_SIZE=1, RANK and WORLD_SIZE. To train in this process only, unset "
            f"{' '.join(TORCHRUN[each] for each in given)}."
        )
        yield Problem(", ".join(missing), text)
        return
    for field in given.keys() - numbers.keys():
        text = "must be an integer, as torchrun sets it. Start ranks with torchrun or srun, or unset it."
        yield Problem(TORCHRUN[field], text, given[field])
    if len(numbers) < len(TORCHRUN):
        return
    for rank, world in (("rank", "world"), ("local_rank", "local_world"), ("local_world", "world")):
        if numbers[rank] > numbers[world] - (0 if rank == "local_world" else 1):
            most = f"{TORCHRUN[world]}={numbers[world]}"
            text = f"too large for {most}. Set both as torchrun does, or unset all of torchrun's variables."
            yield Problem(TORCHRUN[rank], text, numbers[rank])


def is_first_rank() -> bool:
    """Return whether this process reports for the run: rank 0, a process without ranks, or one of unknown rank."""
    try:
        environment = rank_environment()
    except ConfigError:
        return True
    return environment is None or environment.rank == 0


def interactive_note() -> str | None:
    """Return a note that an interactive Slurm shell starts only one process; None outside of such a shell."""
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if not _is_interactive() or tasks == "1":
        return None
    return (
        f"note   interactive Slurm shell: training in this process only, not in SLURM_NTASKS={tasks} ranks. Put srun "
        "in front of the command to start them"
    )


def print_once(text: str, stream: TextIO | None = None) -> None:
    """Print `text` on the first rank only."""
    if is_first_rank():
        print(text, file=stream, flush=True)


def die_with_launcher() -> None:
    """Let Linux send SIGTERM to this rank when its launcher dies, so that it saves and stops.

    A killed launcher cannot end its ranks. They would continue unnoticed and write to the folder of a resumed run
    (prctl(2), PR_SET_PDEATHSIG). Does nothing in a process that is not a rank.
    """
    if rank_environment() is not None:
        die_with_parent()


def adopt_world(config: Config) -> Config:
    """Return `config` with trainer.devices and world set to the number of ranks that were started.

    Raises:
        ConfigError: trainer.devices or world was set to another number.
    """
    environment = rank_environment()
    if environment is None:
        return config
    problems = [
        Problem(key, f"but {found} ranks were started {where}. Set {key}={found}, or start {value} ranks.", value)
        for key, value, found, where in (
            ("trainer.devices", config.trainer.devices, environment.local_world, "on this machine"),
            ("world", config.world or environment.world, environment.world, "in all"),
        )
        if value not in (1, found)
    ]
    if problems:
        raise ConfigError(problems)
    trainer = config.trainer.model_copy(update={"devices": environment.local_world})
    return config.model_copy(update={"trainer": trainer, "world": environment.world})


def world_problems(config: Config) -> list[Problem]:
    """Return a problem if `world` differs from the ranks that this command starts, all on this machine."""
    if config.world in (None, config.trainer.devices):
        return []
    text = (
        f"must equal trainer.devices={config.trainer.devices}, the ranks started here. Set world=null or "
        f"trainer.devices={config.world}, or start the ranks of several machines with torchrun or srun."
    )
    return [Problem("world", text, config.world)]


def _is_srun() -> bool:
    return _slurm_number("SLURM_STEP_ID", FIRST_SPECIAL_STEP) < FIRST_SPECIAL_STEP and not _is_interactive()


def _is_interactive() -> bool:
    """Return whether a shell of `srun --pty` started this process, by the job's name, as in Lightning.

    An srun in such a shell inherits its variables, but its tasks are children of slurmstepd.
    """
    named = os.environ.get("SLURM_JOB_NAME") in INTERACTIVE_NAMES or bool(os.environ.get("SLURM_PTY_PORT"))
    return named and _name_of_parent() != "slurmstepd"


def _name_of_parent() -> str:
    try:
        return Path(f"/proc/{os.getppid()}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _slurm_number(name: str, otherwise: int) -> int:
    value = os.environ.get(name, "").strip()
    return int(value) if value.isdecimal() else otherwise


def _from_slurm() -> RankEnvironment:
    """Read srun's variables (https://slurm.schedmd.com/srun.html, output environment variables)."""
    from lightning.fabric.plugins.environments import SLURMEnvironment

    node, nodes = int(os.environ["SLURM_NODEID"]), os.environ.get("SLURM_STEP_NODELIST", os.environ["SLURM_NODELIST"])
    os.environ.setdefault("MASTER_ADDR", SLURMEnvironment.resolve_root_node_address(nodes))
    # The same port on all nodes; jobs that share a node have different job ids, so different ports.
    os.environ.setdefault("MASTER_PORT", str(15000 + int(os.environ["SLURM_JOB_ID"]) % 10000))
    found = RankEnvironment(
        rank=int(os.environ["SLURM_PROCID"]),
        local_rank=int(os.environ["SLURM_LOCALID"]),
        world=int(os.environ["SLURM_NTASKS"]),
        local_world=_tasks_per_node(os.environ["SLURM_STEP_TASKS_PER_NODE"])[node],
    )
    os.environ.update({name: str(getattr(found, field)) for field, name in TORCHRUN.items()})
    os.environ["GROUP_RANK"] = str(node)
    return found


def _tasks_per_node(text: str) -> list[int]:
    """Return [4, 4, 3] for "4(x2),3"."""
    counts = []
    for part in text.split(","):
        tasks, _, repeat = part.partition("(x")
        counts += [int(tasks)] * int(repeat.rstrip(")") or 1)
    return counts


AGENT, HANDED_ON = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"
"""Variables that torch's agent, torchrun's or ours, sets for its ranks."""
SECONDS = 20.0
"""Time for the first rank to find and report a problem of all ranks, even on a busy machine."""


def report_unless_reported(text: str) -> None:
    """Wait until the first rank has had time to report the same problem, then print `text` for this rank.

    torch's agent ends all ranks when the first one fails. A rank that exits immediately would keep a slower first rank
    from reporting the problem. A problem of this rank only (a missing file on its machine) is printed here. Ranks wait
    for different times, so one per machine prints. srun does not end other ranks, so there only the first rank of each
    machine prints.
    """
    rank = rank_environment()
    if rank is None or _is_handed_on():
        return
    if AGENT not in os.environ and rank.local_rank > 0:
        return
    time.sleep(SECONDS + rank.local_rank)
    print(f"error: rank {rank.rank} on {socket.gethostname()}: {text}", file=sys.stderr, flush=True)


def _is_handed_on() -> bool:
    """Return whether the exception is recorded for the launcher, which reports it."""
    file = os.environ.get(HANDED_ON)
    return bool(file) and Path(str(file)).is_file() and Path(str(file)).stat().st_size > 0
