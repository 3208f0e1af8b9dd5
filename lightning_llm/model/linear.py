"""The one linear layer of every model: what `precision` swaps by name and `parallel` shards by role."""

from torch import Tensor, nn

from lightning_llm.gemm import linear


class Linear(nn.Linear):
    """`y = x W^T + b` in the dtype of `x`; the weight is cast on use, so that the parameter stays the fp32 master."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., out_features]` in the dtype of `x` `[..., in_features]`."""
        return self.multiply(x, self.weight, self.bias)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x weight^T + bias` as this layer computes it, for a shard of its weight."""
        return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
