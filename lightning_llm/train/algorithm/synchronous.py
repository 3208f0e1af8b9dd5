"""algorithm=synchronous."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Synchronous:
    """The `Algorithm` that leaves the weights as the optimizer has made them."""

    def after_update(self, step: int, record: dict[str, Any]) -> None:
        """Do nothing."""

    def tensors(self) -> dict[str, Tensor]:
        """Return no state."""
        return {}

    def numbers(self) -> dict[str, Any]:
        """Return no state."""
        return {}

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Do nothing."""
