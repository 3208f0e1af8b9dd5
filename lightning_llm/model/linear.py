"""The one linear layer of every model: what `precision` swaps by name and `parallel` shards by role."""

import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Linear):
    """`y = x W^T + b` in the dtype of `x`; the weight is cast on use, so that the parameter stays the fp32 master."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., out_features]` in the dtype of `x` `[..., in_features]`."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)
