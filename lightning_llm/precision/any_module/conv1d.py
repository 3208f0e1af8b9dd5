"""The Conv1D of transformers (GPT-2) with casts: a linear layer with its weight as [in_features, out_features]."""

from torch import Tensor

from lightning_llm.linalg.cast_linear import Reduce
from lightning_llm.precision.linear.module import QuantisedLinear
from lightning_llm.precision.native.transformer_engine import NativeLinear


class QuantisedConv1D(QuantisedLinear):
    """`QuantisedLinear` with a transposed weight. Attributes are those of Conv1D, which it is made of (`adopt`)."""

    def forward(self, x: Tensor, reduce: Reduce | None = None) -> Tensor:
        """Return [..., out_features] in the dtype of `x` [..., in_features]."""
        return self.reduced(x, self.weight.t(), self.bias, reduce)

    def extra_repr(self) -> str:
        inputs, outputs = self.weight.shape
        return f"in_features={inputs}, out_features={outputs}, {self.casts_text()}"


class NativeConv1D(NativeLinear):
    """`NativeLinear` with a transposed weight; its kernels need a contiguous copy of it."""

    def forward(self, x: Tensor, reduce: Reduce | None = None) -> Tensor:
        """Return [..., out_features] in the dtype of `x` [..., in_features]."""
        return self.reduced(x, self.weight.t().contiguous(), self.bias, reduce)

    def extra_repr(self) -> str:
        return QuantisedConv1D.extra_repr(self)  # type: ignore[arg-type]


WITH_TRANSPOSED_WEIGHT: dict[type[QuantisedLinear], type[QuantisedLinear]] = {
    QuantisedLinear: QuantisedConv1D,
    NativeLinear: NativeConv1D,
}
"""The class for Conv1D by the class for nn.Linear."""
