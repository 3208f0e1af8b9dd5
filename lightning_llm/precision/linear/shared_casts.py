"""Casts of an activation that several layers read, made once: the input of q, k and v, and that of gate and up.

On a CPU, where a cast takes time, and the memory of one more operand is no matter. A tensor is known by its memory and
its version, which every operator of torch that writes to it raises. Compiled kernels write to memory that they use
again without that, so nothing is kept from one operator of a compiled graph to the next (`forget`).
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")


class _Made(NamedTuple):
    """What was made, and of which numbers: of a storage as it was then. Its memory is not kept by this, its name is."""

    storage: StorageWeakRef
    place: tuple[Any, ...]
    how: Hashable
    result: Any


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x._version


class SharedCasts:
    """The latest result of each kind, for whoever asks for the same of the same tensor next."""

    def __init__(self) -> None:
        self._latest: dict[str, _Made] = {}

    def of(self, x: Tensor, kind: str, how: Hashable, make: Callable[[], T]) -> T:
        """Return what `make` makes of `x`, or has just made of it; `how` names all else that it is a function of."""
        if x.device.type != "cpu" or x.is_inference() or type(x) is not Tensor:
            return make()
        latest, place, storage = self._latest.get(kind), _place(x), StorageWeakRef(x.untyped_storage())
        if latest is not None and (latest.storage, latest.place, latest.how) == (storage, place, how):
            result: T = latest.result
            return result
        self._latest.pop(kind, None)
        result = make()
        self._latest[kind] = _Made(storage, place, how, result)
        return result

    def forget(self) -> None:
        """Let go of all that was made: it is asked for no more, or tensors may have changed unseen."""
        self._latest.clear()


shared = SharedCasts()
