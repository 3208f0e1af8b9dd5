"""The norms and feed-forward networks that a config chooses: parameters, memory and costs. Imports no torch."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar, Literal

from lightning_llm.config.schema.model import FEED_FORWARDS, NORMS, ModelConfig
from lightning_llm.model.spec import FeedForward, ForwardPass, LinearSpec, MemoryPass, Norm, SavedTensor, Size, hidden

if TYPE_CHECKING:
    from torch import nn


@NORMS.register
class RMSNorm(Norm):
    """RMSNorm (arXiv:1910.07467): a weight, which begins as 1, and no bias."""

    module: ClassVar[str] = "lightning_llm.model.norm:RMSNorm"
    kind: Literal["rmsnorm"] = "rmsnorm"

    def vectors(self, model: ModelConfig) -> dict[str, float]:
        return {"weight": 1.0}

    def saved_for(self, size: int, forward: ForwardPass) -> list[SavedTensor]:
        return saved_by_rms_norm(size, forward, forward.width)


@NORMS.register
class LayerNorm(Norm):
    """LayerNorm (arXiv:1607.06450): a weight, which begins as 1, and with model.bias a bias."""

    module: ClassVar[str] = "lightning_llm.model.norm:LayerNorm"
    kind: Literal["layernorm"] = "layernorm"

    def vectors(self, model: ModelConfig) -> dict[str, float]:
        return {"weight": 1.0} | ({"bias": 0.0} if model.bias else {})

    def saved_for(self, size: int, forward: ForwardPass) -> list[SavedTensor]:
        """Return the input, its mean and the inverse of its deviation: fp32 on a GPU, else in the input's dtype."""
        width = max(forward.width, 4) if forward.on_gpu else forward.width
        return [
            SavedTensor("input", size, forward.width, "outside"),
            SavedTensor("mean and inverse deviation", 2, width, "outside"),
        ]

    def build_for(self, model: ModelConfig, size: int) -> "nn.Module":
        return resolve_name(self.module)(size, model.norm_eps, model.bias)


@NORMS.register
class RMSNormZeroCentered(Norm):
    """RMSNorm by 1 + weight, as in Gemma: the weight begins as 0, and weight decay pulls towards the plain norm."""

    module: ClassVar[str] = "lightning_llm.model.norm:RMSNormZeroCentered"
    kind: Literal["rmsnorm_zero_centered"] = "rmsnorm_zero_centered"

    def vectors(self, model: ModelConfig) -> dict[str, float]:
        return {"weight": 0.0}

    def saved_for(self, size: int, forward: ForwardPass) -> list[SavedTensor]:
        """Return the tensors that RMSNorm saves for an input cast to fp32."""
        return saved_by_rms_norm(size, forward, max(forward.width, 4))


def saved_by_rms_norm(size: int, forward: ForwardPass, width: int) -> list[SavedTensor]:
    """Return the saved tensors of `size` elements of `width` bytes: the input and its inverse root mean square."""
    root = SavedTensor("inverse root mean square", 1, max(width, 4), "outside")
    return [SavedTensor("input", size, width, "outside"), root]


class DenseSpec(FeedForward):
    """`down(activation(up(x)))`, or gated, `down(activation(gate(x)) * up(x))`. F: ffn_hidden_size."""

    module: ClassVar[str] = "lightning_llm.model.feed_forward:DenseFeedForward"
    gated: ClassVar[bool]
    activation: ClassVar[str]
    """A key of `model.feed_forward.ACTIVATIONS`."""

    def linears(self, model: ModelConfig) -> list[LinearSpec]:
        inner = Size(model.ffn_hidden_size, "model.ffn_hidden_size", 1, "model.ffn_hidden_size")
        gate = LinearSpec("gate_proj", "column", inner, hidden(model), model.bias)
        up = LinearSpec("up_proj", "column", inner, hidden(model), model.bias, depth_scaled=("llama",))
        down = LinearSpec("down_proj", "row", hidden(model), inner, model.bias, depth_scaled=("gpt2", "llama"))
        return [*([gate] if self.gated else []), up, down]

    def saved_tensors(self, model: ModelConfig, forward: ForwardPass) -> list[SavedTensor]:
        """Return the input, the inputs of the activation function and of its product, and the input of `down_proj`."""
        inner, width = model.ffn_hidden_size, forward.width
        first = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        kept = [SavedTensor("input", model.hidden_size, width, "gathered", linears=first)]
        kept += [SavedTensor(f"{first[0]}'s output", inner, width)]
        if self.gated:
            kept += [SavedTensor("activated gate", inner, width), SavedTensor("up_proj's output", inner, width)]
        return [*kept, SavedTensor("down_proj's input", inner, width, linears=("down_proj",))]

    def divisions(self, model: ModelConfig) -> dict[str, tuple[int, str]]:
        return {"model.ffn_hidden_size": (model.ffn_hidden_size, "its columns are shared out evenly")}

    def memory_passes(self, model: ModelConfig, width: int, compiled: bool) -> list[MemoryPass]:
        """Return the passes of the activation function and, if gated, of the product with the other tensor."""
        inner = width * model.ffn_hidden_size
        if not self.gated:
            return [MemoryPass(2 * inner, 3 * inner)]
        if compiled:
            return [MemoryPass(3 * inner, 5 * inner)]
        return [MemoryPass(2 * inner, 3 * inner), MemoryPass(3 * inner, 6 * inner)]


@FEED_FORWARDS.register
class SwiGLU(DenseSpec):
    """Gated by SiLU (Shazeer 2020, arXiv:2002.05202)."""

    kind: Literal["swiglu"] = "swiglu"
    gated: ClassVar[bool] = True
    activation: ClassVar[str] = "silu"


@FEED_FORWARDS.register
class GELU(DenseSpec):
    """GELU (arXiv:1606.08415), `model.gelu` by the tanh approximation or exactly."""

    kind: Literal["gelu"] = "gelu"
    gated: ClassVar[bool] = False
    activation: ClassVar[str] = "gelu"


@FEED_FORWARDS.register
class GeGLU(DenseSpec):
    """Gated by GELU (Shazeer 2020, arXiv:2002.05202), `model.gelu` by the tanh approximation or exactly."""

    kind: Literal["geglu"] = "geglu"
    gated: ClassVar[bool] = True
    activation: ClassVar[str] = "gelu"


@FEED_FORWARDS.register
class SquaredReLU(DenseSpec):
    """The square of ReLU, without a gate (So et al. 2021, arXiv:2109.08668), as in Nemotron-4."""

    kind: Literal["squared_relu"] = "squared_relu"
    gated: ClassVar[bool] = False
    activation: ClassVar[str] = "squared_relu"
