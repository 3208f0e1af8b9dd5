"""Norms, feed-forward networks and gated linear attention, as a config chooses them: parameters, memory and costs.

Imports no torch; each class names its torch module. Kinds of softmax attention are in `attention/kinds.py`, mixtures of
experts in `experts/kinds.py`.
"""

from collections.abc import Iterator
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.base import PositiveFloat, PositiveInt
from lightning_llm.config.schema.model import FEED_FORWARDS, MIXERS, NORMS, ModelConfig
from lightning_llm.model.spec import (
    FeedForward,
    ForwardPass,
    LinearSpec,
    MemoryPass,
    Mixer,
    Norm,
    ParameterSpec,
    SavedTensor,
    Size,
    hidden,
)
from lightning_llm.model.structure import norm_of

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
    """Feed-forward network gated by SiLU (Shazeer 2020, arXiv:2002.05202)."""

    kind: Literal["swiglu"] = "swiglu"
    gated: ClassVar[bool] = True
    activation: ClassVar[str] = "silu"


@FEED_FORWARDS.register
class GELU(DenseSpec):
    """Feed-forward network with GELU (arXiv:1606.08415), exact or by the tanh approximation (`model.gelu`)."""

    kind: Literal["gelu"] = "gelu"
    gated: ClassVar[bool] = False
    activation: ClassVar[str] = "gelu"


@FEED_FORWARDS.register
class GeGLU(DenseSpec):
    """Feed-forward network gated by GELU (Shazeer 2020, arXiv:2002.05202), exact or by the tanh approximation."""

    kind: Literal["geglu"] = "geglu"
    gated: ClassVar[bool] = True
    activation: ClassVar[str] = "gelu"


@FEED_FORWARDS.register
class SquaredReLU(DenseSpec):
    """Feed-forward network with squared ReLU and no gate (So et al. 2021, arXiv:2109.08668), as in Nemotron-4."""

    kind: Literal["squared_relu"] = "squared_relu"
    gated: ClassVar[bool] = False
    activation: ClassVar[str] = "squared_relu"


@MIXERS.register
class GLA(Mixer):
    """Gated linear attention (Yang et al. 2024, arXiv:2312.06635); keys and defaults are flash-linear-attention's."""

    module: ClassVar[str] = "lightning_llm.model.gla:GLA"
    kind: Literal["gla"] = "gla"
    recurrent: ClassVar[bool] = True

    num_heads: PositiveInt = Field(4, description="heads; more of them make the state smaller")
    expand_k: PositiveFloat = Field(0.5, description="elements of all heads' keys, as a multiple of model.hidden_size")
    expand_v: PositiveFloat = Field(1.0, description="elements of all heads' values, as a multiple of hidden_size")
    gate_low_rank_dim: PositiveInt = Field(16, description="rank of the projection that gives the decays")
    gate_logit_normalizer: PositiveFloat = Field(16.0, description="divides the decays' logarithms: larger forget less")

    def key_dim(self, model: ModelConfig) -> int:
        """Return the elements of a token's keys, over all heads."""
        return round(model.hidden_size * self.expand_k)

    def value_dim(self, model: ModelConfig) -> int:
        """Return the elements of a token's values, over all heads."""
        return round(model.hidden_size * self.expand_v)

    def linears(self, model: ModelConfig) -> list[LinearSpec]:
        key, value = self._side(model, "expand_k"), self._side(model, "expand_v")
        rank = Size(self.gate_low_rank_dim, "gate_low_rank_dim of gla", 1, "gate_low_rank_dim of gla")
        return [
            LinearSpec("q_proj", "column", key, hidden(model), model.bias),
            LinearSpec("k_proj", "column", key, hidden(model), model.bias),
            LinearSpec("v_proj", "column", value, hidden(model), model.bias),
            LinearSpec("gk_down_proj", "duplicate", rank, hidden(model), False),
            LinearSpec("gk_up_proj", "column", key, rank, True),
            LinearSpec("g_proj", "column", value, hidden(model), model.bias),
            LinearSpec("o_proj", "row", hidden(model), value, model.bias, depth_scaled=("gpt2", "llama")),
        ]

    def own_parameters(self, model: ModelConfig) -> list[ParameterSpec]:
        each = norm_of(model).parameters_for(model, self.value_dim(model) // self.num_heads, "per_head")
        return [made._replace(name=f"g_norm.{made.name}") for made in each]

    def flops_per_token(self, model: ModelConfig, sequence_length: int) -> int:
        """Return the FLOPs of the recurrence, k^T v and q S: 12 H K V. Work that chunks repeat does not count."""
        return 12 * self.key_dim(model) * self.value_dim(model) // self.num_heads

    def saved_tensors(self, model: ModelConfig, forward: ForwardPass) -> list[SavedTensor]:
        """Return the tensors saved by the kernel, the norm of each head's values and the gate; for decays in fp32.

        The fp32 tensors are the gate's logits, logsigmoid's buffer (only on a CPU), and the logarithms.
        """
        key, value, width = self.key_dim(model), self.value_dim(model), forward.width
        normed = norm_of(model).saved_for(value // self.num_heads, forward)
        entering = ("q_proj", "k_proj", "v_proj", "gk_down_proj", "g_proj")
        return [
            SavedTensor("input", model.hidden_size, width, "gathered", linears=entering),
            SavedTensor("gk_up_proj's input", self.gate_low_rank_dim, width, "gathered", linears=("gk_up_proj",)),
            SavedTensor("decays", (2 if forward.on_gpu else 3) * key, max(width, 4)),
            SavedTensor("queries and keys", 2 * key, width),
            SavedTensor("values", value, width),
            *(each._replace(elements=self.num_heads * each.elements, split="within") for each in normed),
            SavedTensor("g_proj's output, gate and normed values", 3 * value, width),
            SavedTensor("o_proj's input", value, width, linears=("o_proj",)),
        ]

    def kernel_outputs(self, model: ModelConfig, width: int, sequence_length: int) -> int:
        """Return the bytes of the mixed values."""
        return width * self.value_dim(model)

    def divisions(self, model: ModelConfig) -> dict[str, tuple[int, str]]:
        return {"num_heads of gla": (self.num_heads, "each rank takes whole heads")}

    def memory_passes(self, model: ModelConfig, width: int, compiled: bool) -> list[MemoryPass]:
        """Return the passes of the decays, in fp32, and of the norm and gate of the heads' outputs."""
        key, value, wide = self.key_dim(model), width * self.value_dim(model), 4
        if compiled:
            return [MemoryPass((width + wide) * key, (2 * width + wide) * key), MemoryPass(3 * value, 6 * value)]
        decays = MemoryPass((width + 5 * wide) * key, (width + 6 * wide) * key, 3)
        return [decays, MemoryPass((2 + 2 + 3) * value, (3 + 3 + 6) * value, 3)]

    def problems(self, model: ModelConfig) -> Iterator[Problem]:
        for key in ("expand_k", "expand_v"):
            side, length = self._side(model, key), model.hidden_size * getattr(self, key)
            if length != side.length or length % self.num_heads or not length:
                text = f"{side.text} is {length:g}, not a multiple of gla's num_heads={self.num_heads}. Change one."
                yield Problem("model.blocks", text)

    def _side(self, model: ModelConfig, key: Literal["expand_k", "expand_v"]) -> Size:
        length = self.key_dim(model) if key == "expand_k" else self.value_dim(model)
        text = f"model.hidden_size={model.hidden_size} x {key}={getattr(self, key):g}"
        return Size(length, f"model.hidden_size x {key}", 1, text)
