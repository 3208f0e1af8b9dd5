"""Which rank this process is, where torchrun or Slurm started it. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_llm.errors import ConfigError, Problem

if TYPE_CHECKING:
    from lightning_llm.schema import Config  # pydantic, which --help does without

TORCHRUN = {"rank": "RANK", "local_rank": "LOCAL_RANK", "world": "WORLD_SIZE", "local_world": "LOCAL_WORLD_SIZE"}
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


def _is_srun() -> bool:
    return int(os.environ.get("SLURM_STEP_ID", FIRST_SPECIAL_STEP)) < FIRST_SPECIAL_STEP


def _from_slurm() -> RankEnvironment:
    from lightning.fabric.plugins.environments import SLURMEnvironment

    slurm = SLURMEnvironment(auto_requeue=False)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = slurm.main_address, str(slurm.main_port)
    local_world = int(os.environ["SLURM_STEP_TASKS_PER_NODE"].split("(")[0].split(",")[0])
    found = RankEnvironment(slurm.global_rank(), slurm.local_rank(), slurm.world_size(), local_world)
    os.environ.update({name: str(getattr(found, field)) for field, name in TORCHRUN.items()})
    os.environ["GROUP_RANK"] = str(slurm.node_rank())
    return found
