"""Print the seconds per step of `callbacks=stragglers` for 4 ranks: `python tests/parallel/gather_cost.py`.

The gather uses gloo on every device. Rank 0 also evaluates the figures.
"""

import os
import tempfile
import time
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_llm.callbacks.stragglers import _gather
from lightning_llm.health.stragglers import StragglerDetector
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.waiting import WaitClock
from lightning_llm.plan.degrees import Degrees

STEPS, RANKS = 2000, 4


def rank(number: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=RANKS)
    layout = Layout(None, Degrees(dp_shard=RANKS), number)
    gathers = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        _gather([[0.0, 1.0, 0.0, 0.0]], layout)
        gathers.append(time.perf_counter() - begin)
    if number == 0:
        print(f"gather of {RANKS} ranks: {median(gathers) * 1e3:.3f} ms (median of {STEPS})")


def judging(ranks: int, steps: int) -> None:
    rng, detector = np.random.default_rng(0), StragglerDetector([range(ranks)])
    rows = [np.abs(1 + 0.01 * rng.standard_normal((ranks, 4))) for _ in range(steps)]
    begin = time.process_time()
    for step, row in enumerate(rows):
        detector.take(step, row)
    print(f"judging {ranks} ranks: {(time.process_time() - begin) / steps * 1e3:.3f} ms of CPU")


def counting(waits: int = 100_000) -> None:
    clock = WaitClock(torch.device("cpu"))
    begin = time.process_time()
    for _ in range(waits):
        clock.timed(int)
    print(f"counting a wait: {(time.process_time() - begin) / waits * 1e6:.2f} us of CPU")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (f"{folder}/meeting",), nprocs=RANKS)
    judging(RANKS, 1000)
    judging(1024, 100)
    counting()
