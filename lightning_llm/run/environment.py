"""This process's rank, where torchrun or Slurm started it. Imports no torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from lightning_llm.errors import ConfigError, Problem

if TYPE_CHECKING:
    from lightning_llm.config.schema import Config  # pydantic, which --help does without

TORCHRUN = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world": "WORLD_SIZE", "local_world": "LOCAL_WORLD_SIZE"}
PR_SET_PDEATHSIG = 1
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
    """Return what torchrun's variables (or srun's, which are put under torchrun's names) say, None without them."""
    if all(name in os.environ for name in TORCHRUN.values()):
        return RankEnvironment(**{field: int(os.environ[name]) for field, name in TORCHRUN.items()})
    if int(os.environ.get("SLURM_NTASKS", "1")) > 1 and _is_srun():
        return _from_slurm()
    return None


def is_first_rank() -> bool:
    """Return whether this process speaks for the run: rank 0, or one that is no rank."""
    environment = rank_environment()
    return environment is None or environment.rank == 0


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


def die_with_parent() -> None:
    """Have Linux send this process SIGTERM when the one that started it is gone."""
    if not sys.platform.startswith("linux"):
        return
    launcher = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if launcher == 1:
        return  # a container's own first process, or started by it
    if os.getppid() != launcher:  # it died in between
        os.kill(os.getpid(), signal.SIGTERM)


def adopt_world(config: Config) -> Config:
    """Return `config` with trainer.devices and world as the ranks that were started for it.

    Raises:
        ConfigError: trainer.devices or world was set to something else.
    """
    environment = rank_environment()
    if environment is None:
        return config
    problems = [
        Problem(key, f"is {value}, and {found} ranks were started {where}. Leave it out, or start {value}.")
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
        f"is {config.world}, and {config.trainer.devices} ranks would be started here. Leave it out, set "
        "trainer.devices, or start the ranks of several machines by torchrun or srun (world is for plan)."
    )
    return [Problem("world", text)]


def _is_srun() -> bool:
    return int(os.environ.get("SLURM_STEP_ID", FIRST_SPECIAL_STEP)) < FIRST_SPECIAL_STEP


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
