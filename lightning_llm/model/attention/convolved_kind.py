"""Compressed convolutional attention as a config chooses it: shapes, memory and costs. Imports no torch.

Letters: D hidden_size, H query heads, G key/value heads, K elements per head, C = (H + G) K channels.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.base import PositiveInt
from lightning_llm.config.schema.model import MIXERS, ModelConfig
from lightning_llm.model.attention.kinds import AttentionSpec, head_elements
from lightning_llm.model.kinds import saved_by_rms_norm
from lightning_llm.model.spec import (
    Distribution,
    ForwardPass,
    LinearSpec,
    MemoryPass,
    ParameterSpec,
    SavedTensor,
    Size,
)

KEY = "model.blocks.*.mixer"
ENTERING = ("q_proj", "k_proj", "v_proj", "v_delayed_proj")


@MIXERS.register
class ConvolvedAttention(AttentionSpec):
    """Compressed convolutional attention (CCA, arXiv 2510.04476), as in ZAYA1.

    Attention in a latent space of num_heads x head_dim elements. Two causal convolutions mix queries and keys over
    neighboring tokens; half of the values are those of the token before.
    """

    module: ClassVar[str] = "lightning_llm.model.attention.convolved:ConvolvedAttention"
    context_parallel: ClassVar[bool] = False
    takes_documents: ClassVar[bool] = True
    why_compiled_on_request: ClassVar[str | None] = "cca runs outside of the graphs (parallel.compile=true tries it)"

    kind: Literal["cca"] = "cca"
    depthwise_tokens: PositiveInt = Field(2, description="tokens of the convolution of each channel by itself")
    grouped_tokens: PositiveInt = Field(2, description="tokens of the convolution over the channels of each head")
    rope_dim: PositiveInt | None = Field(
        None, description="first elements of a head that are rotated, even; null: half of them"
    )

    def channels(self, model: ModelConfig) -> int:
        """Return the elements of a token's queries and keys, C."""
        return (model.num_heads + model.num_kv_heads) * model.attention_head_dim

    def rope_width(self, model: ModelConfig) -> int:
        return self.rope_dim or model.attention_head_dim // 2

    @property
    def tokens_before(self) -> int:
        """Tokens before one that its queries and keys depend on."""
        return self.depthwise_tokens + self.grouped_tokens - 2

    def linears(self, model: ModelConfig) -> list[LinearSpec]:
        q, k, v, o = super().linears(model)
        text = f"half of model.num_kv_heads={model.num_kv_heads} x head_dim={model.attention_head_dim}"
        half = Size(v.outputs.length // 2, "model.head_dim", model.num_kv_heads, text)
        v = v._replace(outputs=half)
        return [q, k, v, v._replace(name="v_delayed_proj"), o]

    def own_parameters(self, model: ModelConfig) -> list[ParameterSpec]:
        """Return weights and biases of both convolutions, and the factor of each key head."""
        channels, weight = self.channels(model), Distribution(std=model.init_std)
        columns = model.attention_head_dim * self.grouped_tokens
        return [
            ParameterSpec("depthwise.weight", (channels, self.depthwise_tokens), "per_head", weight),
            ParameterSpec("depthwise.bias", (channels,), "per_head", Distribution()),
            ParameterSpec("grouped.weight", (channels, columns), "per_head", weight),
            ParameterSpec("grouped.bias", (channels,), "per_head", Distribution()),
            ParameterSpec("key_scale.weight", (model.num_kv_heads,), "per_head", Distribution(mean=1.0)),
        ]

    def flops_per_token(self, model: ModelConfig, sequence_length: int) -> int:
        """Return attention's, and the products of the convolution over heads: 6 C K x its tokens."""
        convolved = 6 * self.channels(model) * model.attention_head_dim * self.grouped_tokens
        return super().flops_per_token(model, sequence_length) + convolved

    def saved_tensors(self, model: ModelConfig, forward: ForwardPass) -> list[SavedTensor]:
        """Return attention's tensors, queries and keys before the convolutions, those of their norms, and normed keys.

        The convolutions are computed again in the backward pass.
        """
        first, *rest = super().saved_tensors(model, forward)
        heads, width, size = model.num_heads + model.num_kv_heads, forward.width, model.attention_head_dim
        normed = [
            saved._replace(name=f"heads' {saved.name}", elements=heads * saved.elements, split="within")
            for saved in saved_by_rms_norm(size, forward, width)
        ]
        mixed = SavedTensor("queries and keys before the convolutions", self.channels(model), width)
        keys = SavedTensor("normed keys", model.num_kv_heads * size, width)
        return [first._replace(linears=ENTERING), mixed, *normed, keys, *rest]

    def memory_passes(self, model: ModelConfig, width: int, compiled: bool) -> list[MemoryPass]:
        """Return the passes of both convolutions, of the norms, and of values and rotated heads put together."""
        moved, values = width * self.channels(model), width * model.num_kv_heads * model.attention_head_dim
        taps = self.grouped_tokens * (self.depthwise_tokens + 1)
        return [
            MemoryPass(moved * (2 + 2 * taps), moved * (3 + 5 * taps), 6 * taps),
            MemoryPass(6 * moved, 8 * moved, 8),
            MemoryPass(2 * moved, 3 * moved, 2),
            MemoryPass(2 * (values + moved), 2 * (values + moved), 3),
            *super().memory_passes(model, width, compiled),
        ]

    def why_not_tensor_parallel(self, model: ModelConfig) -> str | None:
        return "half of the value heads of cca are of the token before, which ranks with other heads do not compute"

    def problems(self, model: ModelConfig) -> Iterator[Problem]:
        yield from super().problems(model)
        width, head = self.rope_width(model), model.attention_head_dim
        if model.position == "rope" and (width % 2 or width > head):
            text = f"rotates {width} of {head} elements of a head. Use an even number up to {head}."
            yield Problem(f"{KEY}.rope_dim", text)
        if head_elements(model, "num_kv_heads").length % 2:
            text = f"has {model.num_kv_heads} x {head} elements of values, and cca takes half of them from the token "
            yield Problem("model.num_kv_heads", f"{text}before. Make one of both even.")
