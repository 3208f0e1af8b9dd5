"""The one linear layer of every model: what `precision` swaps by name and `parallel` shards by role."""

from torch import Tensor, nn

from lightning_llm.linalg.gemm import CastOnUse, Reduce


class Linear(CastOnUse, nn.Linear):
    """`y = x W^T + b` in the dtype of `x`."""

    def forward(self, x: Tensor, reduce: Reduce | None = None) -> Tensor:
        """Return `[..., out_features]` in the dtype of `x` `[..., in_features]`, or the result of `reduce`."""
        return self.reduced(x, self.weight, self.bias, reduce)
