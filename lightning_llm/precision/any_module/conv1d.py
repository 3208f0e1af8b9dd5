"""The Conv1D of transformers (GPT-2) with casts: a linear layer with its weight as [in_features, out_features]."""

import functools

from torch import Tensor, nn

from lightning_llm.linalg.cast_linear import Reduce
from lightning_llm.precision.linear.module import QuantisedLinear


class QuantisedConv1D(QuantisedLinear):
    """`QuantisedLinear` with a transposed weight. Attributes are those of Conv1D, which it is made of (`adopt`)."""

    def forward(self, x: Tensor, reduce: Reduce | None = None) -> Tensor:
        """Return [..., out_features] in the dtype of `x` [..., in_features]."""
        return self.reduced(x, self.weight.t(), self.bias, reduce)

    def extra_repr(self) -> str:
        inputs, outputs = self.weight.shape
        return f"in_features={inputs}, out_features={outputs}, {self.casts_text()}"


@functools.cache
def with_transposed_weight(kind: type[QuantisedLinear]) -> type[QuantisedLinear]:
    """Return the class that does for Conv1D what `kind` does for nn.Linear."""
    return QuantisedConv1D if kind is QuantisedLinear else type(f"{kind.__name__}Conv1D", (_Contiguous, kind), {})


class _Contiguous(nn.Module):
    """Forward pass on a copy of the transposed weight, as kernels require."""

    def forward(self, x: Tensor, reduce: Reduce | None = None) -> Tensor:
        layer: QuantisedLinear = self  # type: ignore[assignment]
        return layer.reduced(x, layer.weight.t().contiguous(), layer.bias, reduce)

    def extra_repr(self) -> str:
        return QuantisedConv1D.extra_repr(self)  # type: ignore[arg-type]
