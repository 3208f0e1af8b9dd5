"""Training algorithms: the protocol of what acts on the weights after the optimizer, and the built-in kind.

Imports no torch: it registers `synchronous`, which keeps no tensors.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lightning_llm.config.schema.optim import ALGORITHMS, AlgorithmConfig, ParameterShard

if TYPE_CHECKING:
    from torch import Tensor


class Algorithm(Protocol):
    """What is done to the weights once the optimizer has moved them, and the state that this takes.

    Local-update methods are this: DiLoCo's (Douillard et al. 2023, arXiv 2311.08105) outer step every H inner ones,
    of a fragment at a time and with its sum under way meanwhile in Streaming DiLoCo (arXiv 2501.18512). Over which axes
    gradients are summed in every step its kind states (`AlgorithmConfig.summed_axes`).
    """

    def after_update(self, step: int, record: dict[str, Any]) -> None:
        """Act on the weights after the inner update of step number `step`, from 1, in place, without gradients.

        Called on every rank in every step that is made, a skipped one, too: so collectives may be called here. What is
        to be known of it goes into the step's `record`.
        """

    def tensors(self) -> "dict[str, Tensor]":
        """Return the state by names free of the layout, those of the parameters it belongs to, sharded as they are.

        The checkpoint saves these, and loads into them: the same names must be there before the first step. What is
        under way is awaited first.
        """

    def numbers(self) -> dict[str, Any]:
        """Return the rest of the state as JSON data, the same on every rank."""

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Take back what `numbers` returned, after the tensors have been loaded into."""


class Synchronous:
    """The `Algorithm` that leaves the weights as the optimizer has made them, and keeps no state."""

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
    """All ranks move one set of weights by the sum of their gradients: the optimizer's update is all there is."""

    name: Literal["synchronous"] = "synchronous"

    def summed_axes(self, data_axes: Sequence[str]) -> Sequence[str]:
        return data_axes

    def state_bytes(self, shard: ParameterShard, dtype_bytes: int) -> int:
        return 0

    def build(self, parameters: Iterable[tuple[str, Any]], layout: Any) -> Synchronous:
        return Synchronous()
