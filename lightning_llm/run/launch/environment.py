"""This process's rank, where torchrun or Slurm started it, and which rank prints for all. Imports no torch."""

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
    from lightning_llm.config.schema import Config  # pydantic, which --help does without

TORCHRUN = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world": "WORLD_SIZE", "local_world": "LOCAL_WORLD_SIZE"}
NO_RANK = {"rank": 0, "local_rank": 0, "world": 1, "local_world": 1}
"""Values that any process may have which is alone."""
INTERACTIVE_NAMES = ("bash", "zsh", "sh", "interactive")
"""Names of jobs that are shells (lightning.fabric.plugins.environments.slurm knows two of them)."""
FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm numbers the batch script's and an interactive shell's own step from here on: those are no srun."""


@dataclass(frozen=True)
class RankEnvironment:
    """This process among the ranks of one run: `world` in all, `local_world` on this machine."""

    rank: int
    local_rank: int
    world: int
    local_world: int


def rank_environment() -> RankEnvironment | None:
    """Return the rank of torchrun's variables, or of srun's, which are put under torchrun's names; None without them.

    An empty variable counts as unset. A world of one process needs no variables.

    Raises:
        ConfigError: variables are missing or contradict each other: this process may be one of several ranks.
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
    """Yield what is wrong with torchrun's variables, `given` and those of them that are `numbers`, by field."""
    missing = [name for field, name in TORCHRUN.items() if field not in given]
    if missing:
        known = " ".join(f"{TORCHRUN[field]}={value}" for field, value in given.items())
        text = (
            f"is not set, and {known} is: whether this process is one of several ranks is unclear. Start the ranks by "
            "torchrun (in a PyTorchJob of Kubeflow, too) or srun; or set LOCAL_RANK=0 LOCAL_WORLD_SIZE=1, RANK and "
            f"WORLD_SIZE where each machine or pod has one rank; or unset {' '.join(TORCHRUN[each] for each in given)} "
            "for a run of this process alone."
        )
        yield Problem(", ".join(missing), text)
        return
    for field in given.keys() - numbers.keys():
        yield Problem(TORCHRUN[field], f"is {given[field]!r}, and must be a whole number. Set it as torchrun does.")
    if len(numbers) < len(TORCHRUN):
        return
    for rank, world in (("rank", "world"), ("local_rank", "local_world"), ("local_world", "world")):
        if numbers[rank] > numbers[world] - (0 if rank == "local_world" else 1):
            most = f"{TORCHRUN[world]}={numbers[world]}"
            text = f"is {numbers[rank]}, and {most}. Set both as torchrun does, or unset all of torchrun's variables."
            yield Problem(TORCHRUN[rank], text)


def is_first_rank() -> bool:
    """Return whether this process speaks for the run: rank 0, or one that is no rank, or does not know."""
    try:
        environment = rank_environment()
    except ConfigError:
        return True
    return environment is None or environment.rank == 0


def interactive_note() -> str | None:
    """Return that an interactive shell of Slurm starts one process, None outside of such a shell."""
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if not _is_interactive() or tasks == "1":
        return None
    return (
        f"note   an interactive shell of Slurm is no rank: this process trains alone, and not as one of SLURM_NTASKS="
        f"{tasks}. srun in front of the command starts ranks"
    )


def say(text: str, stream: TextIO | None = None) -> None:
    """Print `text` once for all ranks."""
    if is_first_rank():
        print(text, file=stream, flush=True)


def die_with_launcher() -> None:
    """Have Linux send this rank SIGTERM, on which it saves and stops, when the process that started it is gone.

    A launcher that is killed cannot end its ranks, which would train on unseen, and write where a resumed run does
    (prctl(2), PR_SET_PDEATHSIG). Nothing happens in a process that is no rank.
    """
    if rank_environment() is not None:
        die_with_parent()


def adopt_world(config: Config) -> Config:
    """Return `config` with trainer.devices and world as the ranks that were started for it.

    Raises:
        ConfigError: trainer.devices or world was set to something else.
    """
    environment = rank_environment()
    if environment is None:
        return config
    problems = [
        Problem(key, f"is {value}, and {found} ranks were started {where}. Set {key}={found}, or start {value}.")
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
    """Return what is wrong with `world` where one command starts the ranks of this machine, which are all."""
    if config.world in (None, config.trainer.devices):
        return []
    text = (
        f"is {config.world}, and {config.trainer.devices} ranks would be started here. Set world=null, set "
        f"trainer.devices={config.world}, or start the ranks of several machines by torchrun or srun."
    )
    return [Problem("world", text)]


def _is_srun() -> bool:
    return _slurm_number("SLURM_STEP_ID", FIRST_SPECIAL_STEP) < FIRST_SPECIAL_STEP and not _is_interactive()


def _is_interactive() -> bool:
    """Return whether a shell of `srun --pty` started this process, as Lightning knows it by the job's name.

    srun in such a shell inherits its variables; its tasks are children of Slurm's own process.
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
    # Free on the first node of this job, and the same on all: jobs that share a node have other numbers.
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
"""What torch's agent, torchrun's or ours, sets for the ranks that it starts."""
SECONDS = 20.0
"""In which the first rank has found, on the busiest machine, what all ranks find, and said it."""


def say_unless_said(text: str) -> None:
    """Print `text`, of this rank, once the first rank has had its time to print the same.

    torch's agent ends all ranks with the first that fails: one that ended at once would keep the first rank, which may
    be slower, from saying why. What it finds alone (a file that its machine lacks) it says itself. Ranks wait one after
    the other, so one of a machine speaks. Of ranks that srun has started, which ends no other, the first of a machine.
    """
    rank = rank_environment()
    if rank is None or _is_handed_on():
        return
    if AGENT not in os.environ and rank.local_rank > 0:
        return
    time.sleep(SECONDS + rank.local_rank)
    print(f"error: rank {rank.rank} on {socket.gethostname()}: {text}", file=sys.stderr, flush=True)


def _is_handed_on() -> bool:
    """Return whether what was raised is written down for the launcher, which says it."""
    file = os.environ.get(HANDED_ON)
    return bool(file) and Path(str(file)).is_file() and Path(str(file)).stat().st_size > 0
