"""The description of dense feed-forward networks, without torch: `swiglu` and `gelu`. F: ffn_hidden_size."""

from typing import TYPE_CHECKING, ClassVar, Literal

from lightning_llm.config.schema.block import FEED_FORWARDS
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.spec import FeedForward, ForwardPass, LinearSpec, MemoryPass, SavedTensor, Size, hidden

if TYPE_CHECKING:
    from torch import nn


class DenseSpec(FeedForward):
    """`down(activation(up(x)))`, or gated, `down(activation(gate(x)) * up(x))`."""

    gated: ClassVar[bool]

    def linears(self, model: ModelConfig) -> list[LinearSpec]:
        inner = Size(model.ffn_hidden_size, "model.ffn_hidden_size", 1, "model.ffn_hidden_size")
        gate = LinearSpec("gate_proj", "column", inner, hidden(model), model.bias)
        up = LinearSpec("up_proj", "column", inner, hidden(model), model.bias, depth_scaled=("llama",))
        down = LinearSpec("down_proj", "row", hidden(model), inner, model.bias, depth_scaled=("gpt2", "llama"))
        return [*([gate] if self.gated else []), up, down]

    def saved_tensors(self, model: ModelConfig, forward: ForwardPass) -> list[SavedTensor]:
        """Return the input, what the activation function and the product with it take, and `down_proj`'s input."""
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
        """Return the activation: of one tensor or, gated, times another."""
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

    def build(self, model: ModelConfig) -> "nn.Module":
        from lightning_llm.model.ffn.dense import SwiGLU as Module

        return Module(model)


@FEED_FORWARDS.register
class GELU(DenseSpec):
    """GELU (arXiv:1606.08415), `model.gelu` by the tanh approximation or exactly."""

    kind: Literal["gelu"] = "gelu"
    gated: ClassVar[bool] = False

    def build(self, model: ModelConfig) -> "nn.Module":
        from lightning_llm.model.ffn.dense import GELU as Module

        return Module(model)
