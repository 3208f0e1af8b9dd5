"""FSDP2 under our Strategy, on one rank and on two, against loops written by hand over torch's own FSDP2."""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.rotation import Row, interleaved_minima
from benchmarks.shape import config, loop_steps, plain_model
from benchmarks.trainer_overhead import trainer_steps
from lightning_llm.config.schema import Config
from lightning_llm.data.opening import open_corpus
from lightning_llm.model.decoder import Decoder
from lightning_llm.run.opening import quiet_lightning

REDUCTIONS = ("native", "tree")


def fully_sharded(run: Config) -> Decoder:
    """Return the model under torch's FSDP2: bf16 compute, fp32 reduction, each block a unit."""
    model = plain_model(run)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks.values():
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def join(rank: int, world: int, folder: str) -> None:
    """Make this process rank `rank` of `world`, which meet in `folder`; of several as torchrun would."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    if world > 1:
        os.environ.update({name: str(value) for name, value in names.items()})
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)


def _rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    join(rank, world, folder)
    quiet_lightning()
    words = [f"trainer.devices={world}", "logger=none", "trainer.threads=1"]
    runs = {
        name: config(
            *words,
            "parallel=zero3",
            f"parallel.reduction={name}",
            f"data.global_batch_size={8 * world}",
            f"run.dir={folder}/{name}",  # the same on all ranks
        )
        for name in REDUCTIONS
    }
    corpus = open_corpus(runs["tree"].data, 0, runs["tree"].model.vocab_size)
    ours = {name: trainer_steps(run, corpus) for name, run in runs.items()}
    variants: dict[str, Any] = {name: steps for name, (steps, _, _) in ours.items()}
    if world == 1:
        variants["loop"] = loop_steps(plain_model(runs["tree"]), runs["tree"], corpus)
    variants["fsdp"] = loop_steps(fully_sharded(runs["tree"]), runs["tree"], corpus, rank)
    best = interleaved_minima(variants, rounds=10, steps=3)
    for _, turnstile, thread in ours.values():
        turnstile.go.put(False)
        thread.join(timeout=60)
    if rank == 0:
        Path(folder, "best.json").write_text(json.dumps(best))


def minima(world: int) -> dict[str, float]:
    """Return the fastest step of each variant on `world` ranks of one thread each, seconds."""
    folder = tempfile.mkdtemp(prefix="lightning-llm-bench-")
    multiprocessing.start_processes(_rank, args=(world, folder), nprocs=world, start_method="spawn")
    found: dict[str, float] = json.loads(Path(folder, "best.json").read_text())
    return found


def measure() -> Iterator[Row]:
    """Yield the ratios."""
    one = minima(1)
    yield "hand-written bf16 loop on one rank, seconds per step", one["loop"], ""
    yield "our Strategy, zero3 on one rank, ratio to it", one["tree"] / one["loop"], "<= 1.02"
    two = minima(2)
    yield "plain loop over torch's FSDP2 on two ranks, seconds per step", two["fsdp"], ""
    yield "our Strategy, zero3 with reduction=native, ratio to it", two["native"] / two["fsdp"], "<= 1.05"
    yield "our Strategy, zero3 with reduction=tree, ratio to it", two["tree"] / two["fsdp"], "<= 1.15"
