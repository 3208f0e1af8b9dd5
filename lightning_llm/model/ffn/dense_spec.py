"""The description of dense feed-forward networks, without torch: `swiglu` and `gelu`. F: ffn_hidden_size."""

from typing import TYPE_CHECKING, ClassVar, Literal

from lightning_llm.config.schema.block import FEED_FORWARDS
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.spec import FeedForward, LinearSpec, SavedActivations, Size, hidden

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

    def saved_activations(self, model: ModelConfig, width: int, sequence_length: int) -> SavedActivations:
        """Return the 19 s b h of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), of F = 4 D without a gate.

        16 lie within, the input is 2, a mask of dropout, which is not here, 1. F and the gate are not counted yet.
        """
        each = width * model.hidden_size
        return SavedActivations(within=8 * each, gathered=each, outside=each // 2)

    def divisions(self, model: ModelConfig) -> dict[str, tuple[int, str]]:
        return {"model.ffn_hidden_size": (model.ffn_hidden_size, "its columns are shared out evenly")}


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
