"""Ranks checked before they train (`trainer.health`): no run starts on wrong numbers, or with a slow rank."""

import time

import torch

from lightning_llm.base.errors import UnhealthyError
from lightning_llm.config.schema import Config
from lightning_llm.health.check import check_health
from lightning_llm.health.devices import SHORT
from lightning_llm.health.ranks import Ranks
from lightning_llm.run.launch.environment import rank_environment


def joined_ranks(config: Config) -> Ranks:
    """Return the ranks that have joined, as a check of them meets them. Collective."""
    here = rank_environment()
    local_rank, local_world = (here.local_rank, here.local_world) if here else (0, 1)
    return Ranks(local_rank, local_world, config.parallel.timeout_seconds)


def refuse_unhealthy(ranks: Ranks, device: torch.device) -> str:
    """Check all ranks in short; return what to say where nothing is wrong. Collective.

    Raises:
        UnhealthyError: on every rank, with what is wrong, on which rank of which machine.
    """
    start = time.perf_counter()
    report = check_health(ranks, device, SHORT[device.type])
    if device.type == "cuda":  # what the check held is not the run's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if faults := [*report.wrong, *report.slow_lines()]:
        raise UnhealthyError(f"trainer.health: {'; '.join(faults)}", speaks=ranks.rank == 0)
    seconds = time.perf_counter() - start
    return f"health {ranks.world} rank{'s' if ranks.world > 1 else ''}: values right, none slow ({seconds:.1f} s)"
