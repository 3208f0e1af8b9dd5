"""Measure this machine as a `cluster` file (GEMMs, operators, collectives), then compare `plan`'s steps with real ones.

All times are CPU seconds of ranks with one thread, which other load on a shared machine does not change. Waiting for
other ranks is excluded from figures and steps.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import Tensor

from benchmarks.parallel import join
from benchmarks.rotation import Row
from benchmarks.trainer_overhead import trainer_steps
from lightning_llm.config.compose import compose_config
from lightning_llm.config.workspace import default_outputs
from lightning_llm.data.opening import open_corpus
from lightning_llm.linalg.gemm import linear
from lightning_llm.parallel.torch_private import all_gather
from lightning_llm.plan.check import check_config
from lightning_llm.plan.cluster import write_cluster
from lightning_llm.plan.time.step import StepTimer
from lightning_llm.run.opening import quiet_lightning

RANKS, TOKENS = 2, 2048
SHAPES = ((256, 768), (512, 1408))
"""Widths of the measured linears, forward and backward, for `TOKENS` tokens."""
GATHERED_BYTES = 4 * 2**20
SIZE = ("data.micro_batch_size=4", "data.sequence_length=256", "model.max_sequence_length=256", "model.vocab_size=4096")
STEPS, WARMUP = 5, 1


def _model(hidden: int, layers: int, *more: str) -> tuple[str, ...]:
    heads, inner = hidden // 32, hidden * 11 // 4
    sizes = f"model.num_layers={layers}", f"model.num_heads={heads}", f"model.num_kv_heads={heads}"
    return f"model.hidden_size={hidden}", *sizes, f"model.ffn_hidden_size={inner}", *more


RUNS: dict[str, tuple[str, ...]] = {
    "256 x 4": _model(256, 4),
    "384 x 4": _model(384, 4),
    "256 x 8": _model(256, 8),
    "256 x 4, fp32": _model(256, 4, "precision=fp32"),
    "256 x 4, GELU": _model(256, 4, "model.activation=gelu"),
    "256 x 4, blocks recomputed": _model(256, 4, "parallel.activation_checkpoint=full"),
    "256 x 4, two micro-batches": _model(256, 4, "data.global_batch_size=8"),
    "256 x 4, ddp": _model(256, 4, "parallel=ddp", "trainer.devices=2", "data.global_batch_size=8"),
    "256 x 4, zero3": _model(256, 4, "parallel=zero3", "trainer.devices=2", "data.global_batch_size=8"),
    "384 x 4, zero3": _model(384, 4, "parallel=zero3", "trainer.devices=2", "data.global_batch_size=8"),
    "256 x 4, tp": _model(256, 4, "parallel=tp", "trainer.devices=2"),
    "256 x 4, pp": _model(256, 4, "parallel=pp", "trainer.devices=2", "data.global_batch_size=8"),
}
"""Hidden size x blocks, and the layout; of whole steps, optimizer included."""


def cpu_seconds(run: Callable[[], Any], times: int = 15) -> float:
    """Return the median CPU seconds of a call in this process, after two warm-up calls."""
    found = []
    for _ in range(times + 2):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return median(found[2:])


def linear_seconds(dtype: torch.dtype) -> dict[tuple[int, int, int], float]:
    """Return the CPU seconds of a linear's three products, forward and backward, by (tokens, inputs, outputs).

    As the model multiplies them: with the casts of a CPU that has no unit for `dtype`.
    """
    found = {}
    for narrow, wide in SHAPES:
        x, weight = (torch.randn(*shape).to(dtype).requires_grad_() for shape in ((TOKENS, narrow), (wide, narrow)))
        dy = torch.randn(TOKENS, wide).to(dtype)

        def products(x: Tensor = x, weight: Tensor = weight, dy: Tensor = dy) -> None:
            torch.autograd.grad(linear(x, weight), (x, weight), dy)

        found[TOKENS, narrow, wide] = cpu_seconds(products)
    return found


def flops_of(tokens: int, inputs: int, outputs: int) -> int:
    """Return the FLOPs of a linear's three products."""
    return 6 * tokens * inputs * outputs


def memory_gb_per_second() -> float:
    """Return bytes per CPU second of a block's operators other than GEMMs, forward and backward."""
    x, y = (torch.randn(TOKENS, 704).bfloat16() for _ in range(2))
    weight, wide = torch.ones(704).bfloat16(), torch.randn(TOKENS, 704)
    leaf = torch.randn(TOKENS, 704).bfloat16().requires_grad_()
    elements = x.numel()

    def norm() -> None:
        F.rms_norm(leaf, (704,), weight).backward(y)

    operators: list[tuple[Callable[[], Any], int]] = [
        (lambda: x + y, 6),
        (lambda: F.silu(x), 4),
        (lambda: x * y, 6),
        (lambda: wide + wide, 12),
        (lambda: x.float(), 6),
        (lambda: wide.bfloat16(), 6),
        (norm, 10),
    ]
    moved = sum(size * elements for _, size in operators)
    return moved / sum(cpu_seconds(operator) for operator, _ in operators) / 1e9


def operator_microseconds() -> float:
    """Return half the CPU time of a tiny operator with its backward pass: the overhead of one operator."""
    leaf = torch.randn(8, 8, requires_grad=True)

    def run() -> None:
        x = leaf
        for _ in range(50):
            x = x * 1.5
        x.sum().backward()

    return cpu_seconds(run) / 100 * 1e6


def _gather(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    join(rank, RANKS, folder)
    group, found = dist.distributed_c10d._get_default_group(), []
    for size in (GATHERED_BYTES, 64):
        own, whole = torch.zeros(size // 4), torch.zeros(RANKS * size // 4)
        found.append(cpu_seconds(partial(all_gather, whole, own, group), 30))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.barrier()


def collective_seconds() -> tuple[float, float]:
    """Return the CPU seconds of gathering `GATHERED_BYTES`, and a tiny tensor, from each of two ranks over gloo."""
    folder = tempfile.mkdtemp(prefix="lightning-llm-bench-")
    multiprocessing.start_processes(_gather, args=(folder,), nprocs=RANKS, start_method="spawn")
    large, small = json.loads(Path(folder, "found.json").read_text())
    return large, small


def measured_cluster() -> tuple[dict[str, Any], dict[str, float]]:
    """Return the content of the cluster file, and the speed of each GEMM."""
    torch.set_num_threads(1)
    by_format = {name: linear_seconds(dtype) for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))}
    large, small = collective_seconds()
    memory = memory_gb_per_second()
    link = {"gb_per_second": min(memory, GATHERED_BYTES / max(large - small, 1e-9) / 1e9), "latency_microseconds": 0.0}
    cluster = {
        "hardware": "cpu",
        "devices_per_node": RANKS,
        "memory_gb_per_second": memory,
        "within_node": link,
        "between_nodes": dict(link),
        "start_microseconds": small * 1e6,
        "operator_microseconds": operator_microseconds(),
        "overlap": False,
        "peak_tflops": {
            name: sum(flops_of(*shape) for shape in seconds) / sum(seconds.values()) / 1e12
            for name, seconds in by_format.items()
        },
    }
    speeds = {
        f"{name} linear of {' x '.join(map(str, shape))}": flops_of(*shape) / each / 1e12
        for name, seconds in by_format.items()
        for shape, each in seconds.items()
    }
    return cluster, speeds


def _words(run: Sequence[str]) -> list[str]:
    folder = tempfile.mkdtemp(prefix="lightning-llm-bench-")
    # Every rank composes the config, and a name with the time would differ between ranks.
    place = f"run.root={folder}", "run.name=measured"
    more = "trainer.threads=1", "callbacks=none", "logger=none", "trainer.max_steps=1000", *place
    never = "trainer.validate_every_steps=null", "checkpoint.every_steps=null", "schedule.warmup_steps=1"
    batch = () if any(word.startswith("data.global_batch_size") for word in run) else ("data.global_batch_size=4",)
    return ["model=llama_tiny", *SIZE, *batch, *more, *never, *run]


def _train(rank: int, world: int, folder: str, runs: dict[str, list[str]]) -> None:
    torch.set_num_threads(1)
    quiet_lightning()
    if world > 1:
        join(rank, world, folder)
    found = {}
    for name, words in runs.items():
        run = compose_config(words)
        steps, turnstile, thread = trainer_steps(run, open_corpus(run.data, 0, run.model.vocab_size))
        seconds = []
        for _ in range(WARMUP + STEPS):
            start = time.process_time()
            next(steps)
            seconds.append(time.process_time() - start)
        turnstile.go.put(False)
        thread.join()
        found[name] = median(seconds[WARMUP:])
    Path(folder, f"{rank}.json").write_text(json.dumps(found))


def measured_steps(world: int, runs: dict[str, list[str]]) -> dict[str, float]:
    """Return the median CPU seconds of a step of each run on its busiest rank; `runs`: overrides by name."""
    folder = tempfile.mkdtemp(prefix="lightning-llm-bench-")
    multiprocessing.start_processes(_train, args=(world, folder, runs), nprocs=world, start_method="spawn")
    ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    return {name: max(each[name] for each in ranks) for name in runs}


def measure() -> Iterator[Row]:
    """Yield the measured figures, write the cluster file, and yield predicted over measured CPU seconds of steps."""
    cluster, gemms = measured_cluster()
    for name, speed in gemms.items():
        yield f"{name}, GFLOP/s", 1e3 * speed, ""
    for key in ("memory_gb_per_second", "operator_microseconds", "start_microseconds"):
        yield key, cluster[key], ""
    yield "within_node.gb_per_second", cluster["within_node"]["gb_per_second"], "gloo, between two ranks"
    folder = Path(default_outputs(), "machine")
    file = write_cluster(
        folder, cluster, "This machine in CPU seconds of one-thread ranks, by `make bench ARGS=machine`."
    )
    print(f"written to {file}; use it by --config-dir {folder} cluster=measured")
    words = {name: _words(run) for name, run in RUNS.items()}
    plans = {name: check_config(compose_config([*run, "cluster=measured"], folder)) for name, run in words.items()}
    measured: dict[str, float] = {}
    for world in sorted({plan.degrees.world for plan in plans.values()}):
        measured |= measured_steps(world, {name: words[name] for name in RUNS if plans[name].degrees.world == world})
    errors = []
    for name, plan in plans.items():
        if plan.config.cluster is None:
            raise ValueError("cluster=measured names no cluster")
        step = StepTimer(plan, plan.config.cluster).time
        busy = step.total - step.seconds.get("bubble", 0.0)  # waiting takes no CPU time
        errors.append(abs(busy / measured[name] - 1))
        text = f"measured {measured[name]:.3f} CPU seconds"
        yield f"step of {name}, predicted over measured", busy / measured[name], text
    yield f"median error of {len(errors)} steps, %", 100 * median(errors), "<= 20"
