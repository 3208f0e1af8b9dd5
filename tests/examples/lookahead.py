from typing import Literal

from lightning_llm.config.schema.base import Fraction, PositiveInt
from lightning_llm.config.schema.optim import ALGORITHMS, AlgorithmConfig


@ALGORITHMS.register
class LookaheadConfig(AlgorithmConfig):
    """Return to slow weights every few steps (Zhang et al. 2019, arXiv 1907.08610)."""

    name: Literal["lookahead"] = "lookahead"
    every: PositiveInt = 5
    rate: Fraction = 0.5

    def state_bytes(self, shard, dtype_bytes):
        return dtype_bytes * shard.elements  # the slow weights

    def build(self, parameters, layout):
        return Lookahead(parameters, self)


class Lookahead:
    def __init__(self, parameters, config):
        self.config, self.fast = config, dict(parameters)
        self.slow = {f"slow.{name}": parameter.detach().clone() for name, parameter in self.fast.items()}

    def after_update(self, step, record):
        import torch

        if step % self.config.every == 0:
            with torch.no_grad():
                for fast, slow in zip(self.fast.values(), self.slow.values(), strict=True):
                    fast.copy_(slow.add_(fast - slow, alpha=self.config.rate))

    def tensors(self):  # in the checkpoint, sharded as the parameters are: it loads under other layouts
        return self.slow

    def numbers(self):
        return {}

    def load_numbers(self, numbers):
        pass
