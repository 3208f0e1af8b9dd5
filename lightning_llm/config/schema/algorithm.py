"""`algorithm`: what happens to the weights beside the optimizer's update. A registered kind, chosen by name.

A kind is a subclass of `AlgorithmConfig`: in `lightning_llm/train/algorithm.py`, or in an installed package
(docs/extend.md).
"""

from collections.abc import Iterable, Sequence
from pkgutil import resolve_name
from typing import Any, ClassVar

from pydantic import Field

from lightning_llm.base.registry import Registry
from lightning_llm.config.schema.base import Group
from lightning_llm.config.schema.optim import ParameterShard


class AlgorithmConfig(Group):
    """Base class of training algorithms: the shared key, and the methods that planner and training call."""

    module: ClassVar[str]
    """`package.module:Class` of the torch code, called with (parameters, config)."""

    name: str = Field(description="a registered training algorithm")

    def summed_axes(self, data_axes: Sequence[str]) -> Sequence[str]:
        """Return those of the mesh's `data_axes`, whose ranks have different data, over which gradients are summed.

        All of them, unless an algorithm lets ranks go apart and brings them together by itself. Of an axis that is left
        out each rank's step is that of its own group: gradients, the targets that its loss is a mean over, the norm.
        """
        return data_axes

    def state_bytes(self, shard: ParameterShard, dtype_bytes: int) -> int:
        """Return the bytes that a rank keeps of `shard`, whose weights have `dtype_bytes` each."""
        raise NotImplementedError

    def build(self, parameters: Iterable[tuple[str, Any]], layout: Any) -> Any:
        """Return the `train.algorithm.Algorithm` over this rank's (name, nn.Parameter) pairs.

        `layout` is the `parallel.layout.Layout`: what it reduces over which ranks.
        """
        return resolve_name(self.module)(parameters, self)


ALGORITHMS: Registry[AlgorithmConfig] = Registry("training algorithm", "lightning_llm.train.algorithm", key="name")
