"""Training algorithms: the protocol for changes of the weights after the optimizer step, and the built-in kind.

Imports no torch: it registers `synchronous`, which keeps no tensors.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lightning_llm.config.schema.optim import ALGORITHMS, AlgorithmConfig, ParameterShard

if TYPE_CHECKING:
    from torch import Tensor


class Algorithm(Protocol):
    """Changes the weights after each optimizer update, and keeps the state for that.

    Local-update methods are examples: DiLoCo's outer step every H inner steps (Douillard et al. 2023, arXiv
    2311.08105), or Streaming DiLoCo's of one fragment at a time, overlapped with its communication (arXiv 2501.18512).
    The config class chooses the axes over which gradients are summed in every step (`AlgorithmConfig.summed_axes`).
    """

    def after_update(self, step: int, record: dict[str, Any]) -> None:
        """Act on the weights after the inner update of step number `step`, from 1, in place, without gradients.

        Called on every rank in every completed step, including skipped ones, so collectives are allowed. Add values to
        log to the step's `record`.
        """

    def tensors(self) -> "dict[str, Tensor]":
        """Return the state tensors by layout-independent names, sharded like the parameters they belong to.

        A checkpoint saves these tensors and loads into them, so the same names must exist before the first step. Wait
        for pending communication first.
        """

    def numbers(self) -> dict[str, Any]:
        """Return the remaining state as JSON data, the same on every rank."""

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Restore the result of `numbers`, after the tensors have been loaded."""


class Synchronous:
    """The `Algorithm` that changes nothing after the optimizer's update and keeps no state."""

    def after_update(self, step: int, record: dict[str, Any]) -> None:
        """Do nothing."""

    def tensors(self) -> "dict[str, Tensor]":
        return {}

    def numbers(self) -> dict[str, Any]:
        return {}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Do nothing."""


@ALGORITHMS.register
class SynchronousConfig(AlgorithmConfig):
    """Synchronous training: all ranks update the same weights with the sum of their gradients."""

    name: Literal["synchronous"] = "synchronous"

    def summed_axes(self, data_axes: Sequence[str]) -> Sequence[str]:
        return data_axes

    def state_bytes(self, shard: ParameterShard, dtype_bytes: int) -> int:
        return 0

    def build(self, parameters: Iterable[tuple[str, Any]], layout: Any) -> Synchronous:
        return Synchronous()
