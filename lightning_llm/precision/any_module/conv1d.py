"""The Conv1D of transformers (GPT-2) with casts: a linear layer with its weight as [in_features, out_features]."""

from torch import Tensor

from lightning_llm.precision.linear.module import QuantisedLinear
from lightning_llm.precision.native.transformer_engine import NativeLinear


class QuantisedConv1D(QuantisedLinear):
    """`QuantisedLinear` with a transposed weight. Attributes are those of Conv1D, which it is made of (`adopt`)."""

    @property
    def matrix(self) -> Tensor:
        """The weight as [out_features, in_features]."""
        return self.weight.t()

    def extra_repr(self) -> str:
        inputs, outputs = self.weight.shape
        return f"in_features={inputs}, out_features={outputs}, {self.casts_text()}"


class NativeConv1D(NativeLinear):
    """`NativeLinear` with a transposed weight; its kernels need a contiguous copy of it."""

    @property
    def matrix(self) -> Tensor:
        """The weight as [out_features, in_features]."""
        return self.weight.t().contiguous()

    def extra_repr(self) -> str:
        return QuantisedConv1D.extra_repr(self)  # type: ignore[arg-type]


WITH_TRANSPOSED_WEIGHT: dict[type[QuantisedLinear], type[QuantisedLinear]] = {
    QuantisedLinear: QuantisedConv1D,
    NativeLinear: NativeConv1D,
}
"""The class for Conv1D by the class for nn.Linear."""
