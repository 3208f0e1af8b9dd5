"""What of a tensor lies on this rank."""

from typing import overload

from torch import Tensor
from torch.distributed.tensor import DTensor


@overload
def local(tensor: Tensor) -> Tensor: ...
@overload
def local(tensor: Tensor | None) -> Tensor | None: ...
def local(tensor: Tensor | None) -> Tensor | None:
    """Return the part of a tensor that lies on this rank: a view of a DTensor's shard, a plain tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
