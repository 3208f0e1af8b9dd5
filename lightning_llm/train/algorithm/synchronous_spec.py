"""Synchronous training."""

from collections.abc import Iterable
from typing import Any, Literal

from lightning_llm.config.schema.algorithm import ALGORITHMS, AlgorithmConfig
from lightning_llm.config.schema.optim import ParameterShard


@ALGORITHMS.register
class SynchronousConfig(AlgorithmConfig):
    """All ranks move one set of weights by the sum of their gradients: the optimizer's update is all there is."""

    name: Literal["synchronous"] = "synchronous"

    def state_bytes(self, shard: ParameterShard, dtype_bytes: int) -> int:
        return 0

    def build(self, parameters: Iterable[tuple[str, Any]], layout: Any) -> Any:
        from lightning_llm.train.algorithm.synchronous import Synchronous

        return Synchronous()
