"""`algorithm`: what happens to the weights beside the optimizer's update. A registered kind, chosen by name.

A kind is a subclass of `AlgorithmConfig` in a module `lightning_llm/train/algorithm/*_spec.py`, or in an installed
package (docs/extend.md).
"""

from collections.abc import Iterable
from typing import Any

from pydantic import Field

from lightning_llm.base.registry import Registry
from lightning_llm.config.schema.base import Group
from lightning_llm.config.schema.optim import ParameterShard


class AlgorithmConfig(Group):
    """What every training algorithm has, and what it must say of itself."""

    name: str = Field(description="a registered training algorithm")

    def state_bytes(self, shard: ParameterShard, dtype_bytes: int) -> int:
        """Return the bytes that a rank keeps of `shard`, whose weights have `dtype_bytes` each."""
        raise NotImplementedError

    def build(self, parameters: Iterable[tuple[str, Any]], layout: Any) -> Any:
        """Return the `train.algorithm.protocol.Algorithm` over this rank's (name, nn.Parameter) pairs.

        `layout` is the `parallel.layout.Layout`: what it reduces over which ranks.
        """
        raise NotImplementedError


ALGORITHMS: Registry[AlgorithmConfig] = Registry("training algorithm", "lightning_llm.train.algorithm", key="name")
