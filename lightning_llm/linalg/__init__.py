"""Matrix products, linear layers that cast their weight on use, ranks' parts of tensors, dtypes by name."""

from typing import overload

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""torch's dtype by its name in configs and flags."""


@overload
def local(tensor: Tensor) -> Tensor: ...
@overload
def local(tensor: Tensor | None) -> Tensor | None: ...
def local(tensor: Tensor | None) -> Tensor | None:
    """Return this rank's shard of a DTensor, as a view; any other tensor, and None, is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
