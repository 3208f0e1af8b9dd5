"""Slow ranks of real runs: what each rank needs and waits for, and who is named. 10 CPU seconds."""

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

from lightning_llm.callbacks import stragglers as module
from lightning_llm.callbacks.stragglers import Stragglers
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.health.stragglers import PARTS, WAIT
from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.waiting import WaitClock
from tests.parallel.traced_run import run_with
from tests.run.launch.slow_rank import SlowStep
from tests.run_metrics import curve, read_metrics

DATA, COMPUTE, REST = range(len(PARTS))
PLANTED = 0.5
FIRST, LAST = 3, 6


class Kept(Stragglers):
    """Keeps what rank 0 gathers, [steps, ranks, columns]."""

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.gathered: list[Any] = []

    def _take(self, gathered: Any, record: Any) -> None:
        self.gathered += list(gathered)
        super()._take(gathered, record)


def measured(config: Config, rank: int, where: str, every_steps: int = 1) -> tuple[np.ndarray, list[float], dict]:
    """Train with a rank that sleeps in steps FIRST to LAST; return all seconds, how long it slept in each, figures."""
    slow, kept = SlowStep(rank, PLANTED, FIRST, LAST, where), Kept(every_steps=every_steps, warmup_steps=0)
    run_with(config, slow, kept, saves=False)
    slept: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(slept, SlowStep.slept if dist.get_rank() == rank else {})
    return np.array(kept.gathered), list(slept[rank].values()), kept.summary_fields()


def words(small_run: Any, folder: Path, layout: str, world: int, *more: str) -> Config:
    shape = [f"parallel={layout}", f"trainer.devices={world}", "data.micro_batch_size=1", "model.num_kv_heads=2"]
    return compose_config(small_run(folder, *shape, "trainer.validate_every_steps=3", *more))


CASES = [
    ("tp", 2),
    pytest.param("ddp", 4, marks=pytest.mark.full),
    pytest.param("zero1", 2, marks=pytest.mark.full),
    pytest.param("zero3", 2, marks=pytest.mark.full),
    pytest.param("pp", 2, marks=pytest.mark.full),
    pytest.param("cp", 2, marks=pytest.mark.full),
    pytest.param("hsdp", 4, marks=pytest.mark.full),
    pytest.param("fsdp_pp", 4, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("layout", "world"), CASES)
def test_the_excess_of_one_rank_is_the_wait_of_the_others(layout, world, ranks, small_run, tmp_path):
    seconds, slept, _ = ranks(world).call(measured, words(small_run, tmp_path, layout, world), 1, "compute")
    assert seconds.shape == (6, world, WAIT + 1)
    others = [rank for rank in range(world) if rank != 1]
    longer, waits = [], []
    for step, planted in zip(range(FIRST, LAST + 1), slept, strict=True):
        here = seconds[step - 1]
        longer.append((here[1, COMPUTE] - np.median(here[others, COMPUTE])) / planted)
        waits.append((here[others, WAIT].max() - here[1, WAIT]) / planted)
    assert 0.5 < np.median(longer) < 1.6  # share of the planted delay; other programs of the machine cause the rest
    assert 0.5 < np.median(waits) < 1.6


@pytest.mark.full
def test_a_stall_of_a_ranks_data_is_measured_to_5_per_cent(ranks, small_run, tmp_path):
    config = words(small_run, tmp_path, "zero3", 2)
    seconds, slept, figures = ranks(2).call(measured, config, 1, "data", 3)
    assert seconds[FIRST - 1 :, 1, DATA].sum() / sum(slept) == pytest.approx(1, abs=0.05)
    assert figures["ranks"][1]["data_seconds"] / sum(slept) == pytest.approx(1, abs=0.05)
    assert seconds[:, 0, DATA].sum() < 0.5 * sum(slept)
    assert np.median(seconds[FIRST - 1 :, 0, WAIT]) > 0.5 * PLANTED
    records = [each for each in read_metrics(Path(config.run.dir)) if "loss" in each]
    assert [each["step"] for each in records if "ranks/data_seconds_max" in each] == [3, 6]


class Clock:
    """Sets the seconds of computation that ranks report: 1 with a jitter of 1 %, `factor` times that on rank 1."""

    def __init__(self, factor: float, first_step: int, last_step: int):
        self.factor, self.steps = factor, range(first_step, last_step + 1)
        self.seconds, self.step = 0.0, 0
        self.random = random.Random(dist.get_rank())

    def compute(self, forward: Any) -> Any:
        def slow(decoder: Decoder, *arguments: Any, **keywords: Any) -> Any:
            if decoder.training:  # one micro-batch a step
                self.step += 1
                is_slow = dist.get_rank() == 1 and self.step in self.steps
                self.seconds += self.random.gauss(1, 0.01) * (self.factor if is_slow else 1)
            return forward(decoder, *arguments, **keywords)

        return slow


def named(config: Config, factor: float, first_step: int, last_step: int) -> None:
    clock = Clock(factor, first_step, last_step)
    with (
        patch.object(module, "WaitClock", lambda device: WaitClock(device, lambda: clock.seconds)),
        patch.object(Decoder, "forward", clock.compute(Decoder.forward)),
    ):
        run_with(config, saves=False)


def run_of(small_run: Any, folder: Path, steps: int, callbacks: str) -> Config:
    more = [f"trainer.max_steps={steps}", "schedule.total_steps=300", "trainer.validate_every_steps=null"]
    return words(small_run, folder, "ddp", 4, *more, callbacks, "data.sequence_length=8", "model.hidden_size=8")


def test_a_rank_20_per_cent_slower_is_named_within_3_steps(ranks, small_run, tmp_path):
    config = run_of(small_run, tmp_path / "watched", 36, "callbacks=stragglers")
    ranks(4).call(named, config, 1.2, 21, 25)
    records = read_metrics(Path(config.run.dir))
    (event,) = [each for each in records if "event" in each]
    (straggler,) = event["event_ranks"]
    assert (event["event"], event["event_action"], event["event/straggler"]) == ("straggler", "log", 1)
    assert (event["step"], straggler["since_step"]) == (23, 21)
    assert (straggler["rank"], straggler["work"], straggler["over"]) == (1, "compute", False)
    assert straggler["host"]
    assert straggler["share"] == pytest.approx(0.2, abs=0.03) == event["straggler/1"]
    assert [each["straggler/1"] for each in records if "straggler/1" in each][1:] == [0.0]  # it is over
    assert curve(Path(config.run.dir)) == curve(_plain(ranks, small_run, tmp_path))


def _plain(ranks: Any, small_run: Any, folder: Path) -> Path:
    config = run_of(small_run, folder / "plain", 36, "callbacks=none")
    ranks(4).call(run_with_nothing, config)
    return Path(config.run.dir)


def run_with_nothing(config: Config) -> None:
    run_with(config, saves=False)


@pytest.mark.full
def test_200_steps_of_equal_ranks_name_no_straggler(ranks, small_run, tmp_path):
    config = run_of(small_run, tmp_path, 216, "callbacks=stragglers")
    ranks(4).call(named, config, 1.0, 1, 1)
    assert [each for each in read_metrics(Path(config.run.dir)) if "event" in each] == []
