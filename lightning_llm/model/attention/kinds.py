"""The kinds of causal softmax attention that a config chooses: shapes, memory and costs. Imports no torch.

Letters: D hidden_size, H query heads, G key/value heads, K elements per head, T tokens of a sequence.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.base import PositiveFloat, PositiveInt
from lightning_llm.config.schema.model import MIXERS, ModelConfig
from lightning_llm.model.spec import (
    ForwardPass,
    LinearSpec,
    MemoryPass,
    Mixer,
    ParameterSpec,
    SavedTensor,
    Size,
    hidden,
)
from lightning_llm.model.structure import norm_of

SHORT_KERNEL_TOKENS = 512
"""Longest sequences that `model.attention.cpu_kernel` takes, where its kernel is the faster one."""


class Heads(NamedTuple):
    """Heads of an attention kernel: of queries, of keys and values, and elements per head of keys and of values."""

    queries: int
    keys: int
    width: int
    value_width: int


class AttentionSpec(Mixer):
    """Base class of softmax attention with grouped key/value heads; its sizes are keys of the model."""

    context_parallel: ClassVar[bool] = True
    takes_kernels: ClassVar[bool] = True
    """Whether `trainer.attention_kernel` chooses the kernel."""

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
        """Return the FLOPs per token of q k^T and of the product with v, forward and backward: 12 H K T.

        T is the sequence length, or the number of tokens of a shorter window.
        """
        seen = min(sequence_length, self.window or sequence_length)
        return 12 * model.num_heads * model.attention_head_dim * seen

    def saved_tensors(self, model: ModelConfig, forward: ForwardPass) -> list[SavedTensor]:
        """Return the input of q, k and v, the kernel's saved tensors, and its output, the input of `o_proj`.

        Queries and keys are saved after the rotation only. Torch's kernels also save one fp32 log-sum-exp per head and
        a mask in the compute dtype for every block; `cpu_kernel` saves neither.
        """
        query, width = model.num_heads * model.attention_head_dim, forward.width
        kept = [
            SavedTensor("input", model.hidden_size, width, "gathered", linears=("q_proj", "k_proj", "v_proj")),
            SavedTensor("queries", query, width),
            SavedTensor("keys and values", self.kept_keys(model, forward), width),
            SavedTensor("mixed values", query, width, linears=("o_proj",), also=True),
        ]
        if self.uses_short_kernel(forward):
            return kept
        kept.append(SavedTensor("log-sum-exp", model.num_heads, 4))
        if self.is_masked(forward) and not forward.by_blocks:
            kept.append(mask_of(forward, width))
        return kept

    def kept_keys(self, model: ModelConfig, forward: ForwardPass) -> int:
        """Return the elements of keys and values for each token computed: ranks that share a sequence keep all of it.

        They are kept for all heads as CUDA's attention with a mask takes them (`attention.for_all_heads`),
        unless it is FlexAttention's.
        """
        for_all = forward.on_gpu and self.is_masked(forward) and not forward.by_blocks
        heads = model.num_heads if for_all else model.num_kv_heads
        return 2 * heads * model.attention_head_dim * forward.context_ranks

    def uses_short_kernel(self, forward: ForwardPass) -> bool:
        """Return whether `cpu_kernel.short_attention` runs."""
        return not forward.on_gpu and forward.context_ranks == 1 and forward.sequence_length <= SHORT_KERNEL_TOKENS

    def keeps_shared_mask(self, forward: ForwardPass) -> bool:
        """Return whether the kernel keeps the mask that the model makes once for all blocks."""
        return self.uses_short_kernel(forward)

    def is_masked(self, forward: ForwardPass) -> bool:
        """Return whether attention is not plainly causal over whole sequences."""
        hides = self.window is not None and self.window < forward.sequence_length
        return hides or forward.documents or forward.context_ranks > 1

    def kernel_outputs(self, model: ModelConfig, width: int, sequence_length: int) -> int:
        """Return the bytes that torch's kernels keep: the mixed values, and one fp32 log-sum-exp per head."""
        return width * model.num_heads * model.attention_head_dim + 4 * model.num_heads

    def context_elements(self, model: ModelConfig, width: int = 1) -> int:
        """Return the number of elements of keys and values."""
        return 2 * model.num_kv_heads * model.attention_head_dim // width

    def heads(self, model: ModelConfig) -> Heads:
        """Return the heads that the kernel sees."""
        return Heads(model.num_heads, model.num_kv_heads, model.attention_head_dim, model.attention_head_dim)

    def cached_elements(self, model: ModelConfig) -> int:
        """Return the elements that generation keeps for each token seen."""
        heads = self.heads(model)
        return heads.keys * (heads.width + heads.value_width)

    def window_tokens(self, model: ModelConfig) -> int | None:
        return self.window

    def divisions(self, model: ModelConfig) -> dict[str, tuple[int, str]]:
        return {
            "model.num_heads": (model.num_heads, "each rank takes whole heads"),
            "model.num_kv_heads": (model.num_kv_heads, "each rank takes whole key/value heads, which are not copied"),
        }

    def memory_passes(self, model: ModelConfig, width: int, compiled: bool) -> list[MemoryPass]:
        """Return the passes that rotate queries and keys.

        `rope._rotate` casts to fp32, multiplies all and adds halves into one tensor (3 operators), casts back.
        """
        if model.position != "rope":
            return []
        turned, wide = (model.num_heads + model.num_kv_heads) * model.attention_head_dim, 4  # fp32
        each = 2 * width if compiled else 2 * (width + wide) + (2 + 3) * wide
        return [MemoryPass(turned * each, turned * each, 2 if compiled else 16)]

    def problems(self, model: ModelConfig) -> Iterator[Problem]:
        if model.head_dim is None and model.hidden_size % model.num_heads:
            heads = f"model.num_heads={model.num_heads}"
            text = f"{model.hidden_size} is not a multiple of {heads}. Change one, or set head_dim."
            yield Problem("model.hidden_size", text)
        elif model.position == "rope" and model.attention_head_dim % 2:
            text = f"is {model.attention_head_dim}, and position=rope turns pairs of features. Make it even."
            yield Problem("model.head_dim", text)
        if model.num_heads % model.num_kv_heads:
            text = (
                f"model.num_heads={model.num_heads} is not a multiple of {model.num_kv_heads}: each must serve equally "
                "many."
            )
            yield Problem("model.num_kv_heads", text)


def head_elements(model: ModelConfig, heads: Literal["num_heads", "num_kv_heads"]) -> Size:
    """Return the size that so many heads have together."""
    count, width = getattr(model, heads), model.attention_head_dim
    return Size(count * width, "model.head_dim", count, f"model.{heads}={count} x head_dim={width}")


def mask_of(forward: ForwardPass, width: int) -> SavedTensor:
    """Return a mask of `width` bytes for each pair of a token and a key, of each sequence where documents differ."""
    return SavedTensor("mask", forward.sequence_length, width, "gathered", per_position=not forward.documents)


@MIXERS.register
class Attention(AttentionSpec):
    """Softmax attention as in Llama and GPT."""

    module: ClassVar[str] = "lightning_llm.model.attention.attention:Attention"
    kind: Literal["attention"] = "attention"


@MIXERS.register
class QKNormAttention(AttentionSpec):
    """Attention with queries and keys normed within each head, as in Qwen3 (arXiv 2505.09388, section 2)."""

    module: ClassVar[str] = "lightning_llm.model.attention.attention:QKNormAttention"
    kind: Literal["qk_norm_attention"] = "qk_norm_attention"

    def own_parameters(self, model: ModelConfig) -> list[ParameterSpec]:
        each = norm_of(model).parameters_for(model, model.attention_head_dim, "per_head")
        return [made._replace(name=f"{norm}.{made.name}") for norm in ("q_norm", "k_norm") for made in each]

    def saved_tensors(self, model: ModelConfig, forward: ForwardPass) -> list[SavedTensor]:
        """Return attention's, and those of both norms, one vector per head."""
        heads, each = model.num_heads + model.num_kv_heads, norm_of(model).saved_for(model.attention_head_dim, forward)
        normed = [
            saved._replace(name=f"heads' {saved.name}", elements=heads * saved.elements, split="within")
            for saved in each
        ]
        return super().saved_tensors(model, forward) + normed

    def memory_passes(self, model: ModelConfig, width: int, compiled: bool) -> list[MemoryPass]:
        """Return the passes of attention and of the norms of queries and keys."""
        normed = width * (model.num_heads + model.num_kv_heads) * model.attention_head_dim
        return [MemoryPass(2 * normed, 3 * normed, 2), *super().memory_passes(model, width, compiled)]


@MIXERS.register
class SoftCappedAttention(AttentionSpec):
    """Attention with scores capped before the softmax, as in Gemma 2 (arXiv 2408.00118, section 2).

    No torch kernel caps scores, so all scores are materialized: memory grows with the square of the sequence.
    """

    takes_kernels: ClassVar[bool] = False
    module: ClassVar[str] = "lightning_llm.model.attention.attention:SoftCappedAttention"
    kind: Literal["soft_capped_attention"] = "soft_capped_attention"
    cap: PositiveFloat = Field(50.0, description="scores are cap x tanh(scores / cap)")
    query_pre_attention_scalar: PositiveInt | None = Field(
        None, description="scores are q k over its square root; null: the elements per head"
    )

    def saved_tensors(self, model: ModelConfig, forward: ForwardPass) -> list[SavedTensor]:
        """Return the tensors that plain operations save: per score tanh and probability in fp32, and rounded; a mask.

        Keys and values are saved for all heads, expanded for the products.
        """
        query, width = model.num_heads * model.attention_head_dim, forward.width
        scores = model.num_heads * forward.sequence_length
        return [
            SavedTensor("input", model.hidden_size, width, "gathered", linears=("q_proj", "k_proj", "v_proj")),
            SavedTensor("queries", query, width),
            SavedTensor("keys and values", 2 * query * forward.context_ranks, width),
            SavedTensor("tanh of scores", scores, 4),
            SavedTensor("probabilities", scores, 4),
            *([SavedTensor("rounded probabilities", scores, width)] if width < 4 else []),
            mask_of(forward, 1),
            SavedTensor("mixed values", query, width, linears=("o_proj",)),
        ]

    def keeps_shared_mask(self, forward: ForwardPass) -> bool:
        return False

    def kernel_outputs(self, model: ModelConfig, width: int, sequence_length: int) -> int:
        """Return the bytes that two matrix products keep: the scores and the mixed values."""
        return width * model.num_heads * (sequence_length + model.attention_head_dim)
