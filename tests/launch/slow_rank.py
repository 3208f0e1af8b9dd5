"""A callback that makes one rank's GEMMs slow before the run begins, as a device that throttles does."""

import time

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_llm.health.products import SquareProduct
from lightning_llm.run.environment import rank_environment


class SlowRank(pl.Callback):
    """Adds `pause_seconds` to each GEMM of the check on `rank`."""

    def __init__(self, rank: int, pause_seconds: float):
        here, run = rank_environment(), SquareProduct.run
        if here is None or here.rank != rank or dist.is_initialized():
            return

        def paused(product):
            time.sleep(pause_seconds)
            return run(product)

        SquareProduct.run = paused
