"""The description of `attention`, without torch: causal softmax attention with grouped key/value heads.

Letters: D hidden_size, H query heads, G key/value heads, K elements per head, T tokens of a sequence.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from lightning_llm.config.schema.base import PositiveInt
from lightning_llm.config.schema.block import MIXERS
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.errors import Problem
from lightning_llm.model.spec import LinearSpec, Mixer, SavedActivations, Size, hidden

if TYPE_CHECKING:
    from torch import nn


class AttentionSpec(Mixer):
    """What every kind of softmax attention here holds and costs; their sizes are the model's own keys."""

    context_parallel: ClassVar[bool] = True

    window: PositiveInt | None = Field(None, description="tokens up to itself that each token sees; null: all")

    def linears(self, model: ModelConfig) -> list[LinearSpec]:
        query, key = head_elements(model, "num_heads"), head_elements(model, "num_kv_heads")
        return [
            LinearSpec("q_proj", "column", query, hidden(model), model.bias),
            LinearSpec("k_proj", "column", key, hidden(model), model.bias),
            LinearSpec("v_proj", "column", key, hidden(model), model.bias),
            LinearSpec("o_proj", "row", hidden(model), query, model.bias, depth_scaled=("gpt2", "llama")),
        ]

    def flops_per_token(self, model: ModelConfig, sequence_length: int) -> int:
        """Return those of q k^T and the product with v: 12 H K T; with a window, T are its tokens."""
        seen = min(sequence_length, self.window or sequence_length)
        return 12 * model.num_heads * model.attention_head_dim * seen

    def saved_activations(self, model: ModelConfig, width: int, sequence_length: int) -> SavedActivations:
        """Return the 11 s b h of Korthikanti et al. 2022 (arXiv 2205.05198, section 4.1), which leave out the scores.

        Of these q, k, v and the input of `o_proj` are 8, the input 2, and a mask of dropout, which is not here, 1.
        """
        each = width * model.hidden_size
        return SavedActivations(within=4 * each, gathered=each, outside=each // 2)

    def kernel_outputs(self, model: ModelConfig, width: int, sequence_length: int) -> int:
        """Return those of torch's kernels: the mixed values, and one fp32 log-sum-exp per head."""
        return width * model.num_heads * model.attention_head_dim + 4 * model.num_heads

    def context_elements(self, model: ModelConfig) -> tuple[int, int]:
        """Return keys and values, which are kept for all heads, as CUDA's attention with a mask takes them.

        See `model.mixer.attention.for_all_heads`.
        """
        width = model.attention_head_dim
        return 2 * model.num_kv_heads * width, 2 * model.num_heads * width

    def window_tokens(self, model: ModelConfig) -> int | None:
        return self.window

    def divisions(self, model: ModelConfig) -> dict[str, tuple[int, str]]:
        return {
            "model.num_heads": (model.num_heads, "each rank takes whole heads"),
            "model.num_kv_heads": (model.num_kv_heads, "each rank takes whole key/value heads, which are not copied"),
        }

    def problems(self, model: ModelConfig) -> Iterator[Problem]:
        if model.head_dim is None and model.hidden_size % model.num_heads:
            text = (
                f"{model.hidden_size} is no multiple of model.num_heads={model.num_heads}. Change one, or set head_dim."
            )
            yield Problem("model.hidden_size", text)
        elif model.position == "rope" and model.attention_head_dim % 2:
            text = f"is {model.attention_head_dim}, and position=rope turns pairs of features. Make it even."
            yield Problem("model.head_dim", text)
        if model.num_heads % model.num_kv_heads:
            text = (
                f"model.num_heads={model.num_heads} is no multiple of {model.num_kv_heads}: each must serve equally "
                "many."
            )
            yield Problem("model.num_kv_heads", text)


@MIXERS.register
class Attention(AttentionSpec):
    """Softmax attention as in Llama and GPT."""

    kind: Literal["attention"] = "attention"

    def build(self, model: ModelConfig) -> "nn.Module":
        from lightning_llm.model.mixer.attention import Attention as Module

        return Module(self, model)


def head_elements(model: ModelConfig, heads: Literal["num_heads", "num_kv_heads"]) -> Size:
    """Return the size that so many heads have together."""
    count, width = getattr(model, heads), model.attention_head_dim
    return Size(count * width, "model.head_dim", count, f"model.{heads}={count} x head_dim={width}")
