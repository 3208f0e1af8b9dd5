"""A dry run against the same step for real, on ranks of gloo, and against the plan's formulas. 25 seconds."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError, Terminated
from lightning_llm.base.signals import raised_as_terminated
from lightning_llm.base.terminal import Waiting
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.dry_run import ranks as processes
from lightning_llm.dry_run.rank import CPU, count_step
from lightning_llm.dry_run.ranks import dry_run
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.resolve import plan_of

FULL = pytest.mark.full
UNVOTED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
"""Whether torch's pipelines leave out, in a fake process group, the vote of the first step, which the host reads."""
LAYOUTS = [
    pytest.param("zero3", 4, ["parallel.reduction=native"], marks=FULL),
    ("fsdp_pp", 4, ["model.num_layers=4", "model.tie_embeddings=true"]),
    pytest.param("tp", 2, ["data.document_mask=true"], marks=FULL),
    pytest.param("fsdp_cp", 4, ["parallel.activation_checkpoint=full"], marks=FULL),
    pytest.param("zero1", 4, ["parallel.reduction=native"], marks=FULL),
    pytest.param("ddp", 4, ["precision=fp16", "optim=adamw8bit"], marks=FULL),
    pytest.param("hsdp_tp", 8, ["model.layers=[gla, attention]"], marks=FULL),
    pytest.param("pp_interleaved", 2, ["model.num_layers=4", "parallel.activation_checkpoint=selective"], marks=FULL),
    pytest.param("pp", 4, ["model.num_layers=4", "parallel.schedule=gpipe"], marks=FULL),
    pytest.param("pp_interleaved", 4, ["model.num_layers=8", "parallel.activation_checkpoint=full"], marks=FULL),
]


def of_the_step(counts: dict[str, Any]) -> dict[str, Any]:
    """All counts except time, peak, and operations, because fake tensors need one or two more."""
    return {key: value for key, value in counts.items() if key not in ("cpu_seconds", "operations", "peak_bytes")}


def counted(config: Config) -> list[dict[str, Any]]:
    """Return every rank's counts of a real step, on rank 0."""
    plan = plan_of(config)
    here = asdict(count_step(plan, Layout.from_config(plan.config.parallel, plan.degrees, CPU), None))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, here)
    return gathered


def lowest_peaks(steps: Iterator[list[dict[str, Any]]], expected: dict[int, int]) -> dict[int, int]:
    """Return each rank's least peak bytes in at most `steps` real steps, fewer if `expected` is met before.

    A real collective's thread lets go of its tensors when it comes to it: half a kilobyte more, once in two steps.
    """
    least: dict[int, int] = {}
    for counts in steps:
        least = {rank: min(counts[rank]["peak_bytes"], least.get(rank, sys.maxsize)) for rank in expected}
        if least == expected:
            break
    return least


@pytest.mark.parametrize(("layout", "world", "more"), LAYOUTS)
def test_a_dry_run_counts_what_ranks_really_do(layout, world, more, ranks, small_run, tmp_path):
    words = [f"parallel={layout}", f"trainer.devices={world}", "precision=bf16", "data.micro_batch_size=1"]
    words += ["data.global_batch_size=16", "model.num_heads=4", "model.num_kv_heads=2", "model.vocab_size=384"]
    words += ["data.sequence_length=64"]
    config = compose_config(small_run(tmp_path, *words, *more))
    dry = dry_run(plan_of(config))
    real = ranks(world).call(counted, config)
    for each in dry["ranks"]:
        same = real[each["rank"]]
        kept = of_the_step(each)
        kept["host_waits"] += UNVOTED and plan_of(config).degrees.pp > 1
        assert kept == {key: same[key] for key in kept}
    peaks = {each["rank"]: each["peak_bytes"] for each in dry["ranks"]}
    again = (ranks(world).call(counted, config) for _ in range(7))
    assert lowest_peaks(chain([real], again), peaks) == peaks
    assert dry["differences"] == []
    assert dry["memory_bytes"]["total"] == max(each["peak_bytes"] for each in dry["ranks"])


def test_it_needs_no_memory_for_a_large_model():
    """Casts, too, are counted and not made: of 8 billion parameters' layers in MXFP8."""
    words = ["recipe=llama3_8b_fsdp2", "model.num_layers=2", "data.sequence_length=1024", "precision=mxfp8"]
    plan = plan_of(compose_config(words))
    dry = dry_run(plan)
    assert dry["differences"] == []
    assert dry["memory_bytes"]["parameters"] == pytest.approx(4 * 1_486_897_152 / 64, rel=1e-3)  # fp32 over 64 ranks


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_ends_a_dry_run_and_its_processes(number, monkeypatch):
    """The signal comes in the first of 128 micro-batches: nothing is waited for, and nothing continues."""
    plan = plan_of(compose_config(["recipe=llama3_8b_fsdp2", "model.num_layers=2", "data.global_batch_size=8192"]))
    assert plan.micro_batches == 128
    told, pids, start = [], [], processes._start

    def tell(_: Waiting, done: int, more: str = "") -> None:
        told.append((done, more))
        if done == 1:
            os.kill(os.getpid(), number)

    def started(*args: Any) -> Any:
        connection, process = start(*args)
        pids.append(process.pid)
        return connection, process

    monkeypatch.setattr(Waiting, "tell", tell)
    monkeypatch.setattr(processes, "_start", started)
    with pytest.raises((KeyboardInterrupt, Terminated)), raised_as_terminated():
        dry_run(plan)
    assert told[-1][0] == 1
    assert told[-1][1].startswith(", about ")
    assert len(pids) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


@pytest.mark.full
def test_a_dry_run_that_is_killed_leaves_no_process():
    words = [sys.executable, "-m", "lightning_llm", "plan", "recipe=frontier_22b", "--dry-run"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as command:
        parent = psutil.Process(command.pid)
        while len(found := parent.children(recursive=True)) < 3:  # the forkserver, and two ranks
            time.sleep(0.2)
        command.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(found, timeout=60)
    assert alive == []


def test_plans_with_exchanged_objects_cannot_run_dry(small_run, tmp_path):
    """Muon's ranks ask each other once which parts of a matrix they hold."""
    words = ["parallel=zero1", "trainer.devices=2", "optim=muon", "data.micro_batch_size=1", "data.global_batch_size=4"]
    with pytest.raises(ConfigError, match="--dry-run: ranks exchange objects"):
        dry_run(plan_of(compose_config(small_run(tmp_path, *words))))


@pytest.mark.parametrize("words", [["--matrix"], ["-m", "seed=0,1"], ["--accounting", "megatron"]])
def test_a_dry_run_is_of_one_run_of_this_trainer(words, capsys):
    assert main(["plan", "recipe=quickstart", "--dry-run", *words]) == 2
    assert "--dry-run: " in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["llama3_8b_fsdp2", "llama3_70b_2d", "llama3_405b_3d", "megatron_gpt3_175b"])
def test_shipped_recipes_run_dry_as_planned(recipe):
    assert dry_run(plan_of(compose_config([f"recipe={recipe}"])))["differences"] == []
