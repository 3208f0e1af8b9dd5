"""A training algorithm with both kinds of state: tensors that are sharded as the parameters are, and a number."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class SlowWeights:
    """Every `every` steps, go back half the way to slow weights, a third of it, a quarter."""

    def __init__(self, parameters: Iterable[tuple[str, Any]], every: int):
        self.every, self.moves = every, 0
        self.fast = dict(parameters)
        self.slow = {f"slow.{name}": parameter.detach().clone() for name, parameter in self.fast.items()}

    @torch.no_grad()
    def after_update(self, step: int, record: dict[str, Any]) -> None:
        if step % self.every:
            return
        self.moves += 1
        record["moves"] = self.moves
        for fast, slow in zip(self.fast.values(), self.slow.values(), strict=True):
            fast.copy_(slow.add_(fast - slow, alpha=1 / (1 + self.moves)))

    def tensors(self) -> dict[str, Tensor]:
        return self.slow

    def numbers(self) -> dict[str, Any]:
        return {"moves": self.moves}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        self.moves = numbers["moves"]
