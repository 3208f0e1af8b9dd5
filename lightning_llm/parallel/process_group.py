"""Joining the process group of a run's ranks."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.parallel.cuda_environment import GLOO, NCCL, set_missing
from lightning_llm.parallel.meeting import meet, open_store

JOINED = "lightning-llm/joined"
"""The key under which the ranks' store counts the groups that have met by it."""


def join_process_group(device: torch.device, world: int, timeout_seconds: float) -> None:
    """Join the ranks that torchrun's variables name; a world of one needs none of them. A second call does nothing.

    On CUDA, CPU tensors have a group too (gloo beside NCCL): checkpoints are written through it.

    Raises:
        ConfigError: rank 0's port is taken, or a rank did not come in time, see `meeting`.
    """
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if world == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    set_missing(NCCL if device.type == "cuda" else GLOO)
    rank = int(os.environ["RANK"])
    try:
        store = open_store(rank, timeout_seconds)
        # torchrun's store may outlive its ranks (torch 2.13, --rdzv-backend=c10d): those it starts again are not to
        # take what lost ones wrote for addresses of their peers. All read this before the first has joined them all.
        joined = store.add(JOINED, 0)
        meet(dist.PrefixStore(f"meeting_{joined}", store), rank, world, timeout_seconds)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"joined_{joined}", store),
            rank=rank,
            world_size=world,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        if rank == 0:
            store.add(JOINED, 1)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        text = f"not all of {world} ranks joined within {timeout_seconds:g} s ({error}). Start the missing ones."
        raise ConfigError(Problem("WORLD_SIZE", text)) from error


def record_collectives(device: torch.device, run_dir: Path) -> None:
    """Have NCCL's flight recorder write to `run_dir`/ranks/nccl_RANK when a collective times out."""
    if device.type != "cuda" or not dist.is_initialized():
        return
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        os.environ.setdefault(name, str(run_dir / "ranks" / "nccl_"))


def leave_process_group() -> None:
    """Leave, where one was joined: other ranks then see an end, not a lost peer."""
    if dist.is_initialized():
        dist.destroy_process_group()
