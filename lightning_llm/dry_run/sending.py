"""What a rank sends, held as a real work holds it: torch's fake ones let go at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_llm.parallel.torch_private import private


class _Sending:
    """A send on its way, with what is sent: as long as somebody has it, waited for or not. gloo's works are so."""

    def __init__(self, work: Any, tensor: Tensor):
        self._work, self._tensor = work, tensor

    def wait(self, *args: Any) -> Any:
        return self._work.wait(*args)

    def is_completed(self) -> Any:
        return self._work.is_completed()


@contextmanager
def sends_held() -> Iterator[None]:
    """Have `dist.isend` return works that hold what they send; it stays one function, by which schedules know it."""
    whole = private(dist, "isend")

    @wraps(whole)
    def isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _Sending(whole(tensor, *args, **kwargs), tensor)

    owners: tuple[Any, ...] = dist, dist.distributed_c10d
    for owner in owners:
        owner.isend = isend
    try:
        yield
    finally:
        for owner in owners:
            owner.isend = whole
