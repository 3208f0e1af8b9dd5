"""This rank's part of a tensor."""

from typing import overload

from torch import Tensor
from torch.distributed.tensor import DTensor


@overload
def local(tensor: Tensor) -> Tensor: ...
@overload
def local(tensor: Tensor | None) -> Tensor | None: ...
def local(tensor: Tensor | None) -> Tensor | None:
    """Return this rank's part of a tensor: a view of a DTensor's shard, or a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
