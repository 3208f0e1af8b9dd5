"""Latent attention as a config chooses it: shapes, memory and costs. Imports no torch.

Letters: D hidden_size, H heads, R kv_rank, K = nope_dim + rope_dim, V value_dim, T tokens of a sequence.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.base import PositiveFloat, PositiveInt
from lightning_llm.config.schema.model import MIXERS, ModelConfig
from lightning_llm.model.attention.kinds import AttentionSpec, Heads, mask_of
from lightning_llm.model.spec import ForwardPass, LinearSpec, MemoryPass, ParameterSpec, SavedTensor, Size, hidden
from lightning_llm.model.structure import norm_of

KEY = "model.blocks.*.mixer"


@MIXERS.register
class LatentAttention(AttentionSpec):
    """Multi-head latent attention as in DeepSeek-V2 and V3; the defaults are V3's (arXiv 2412.19437, section 4.2).

    Keys and values of all heads are expanded from one latent per token, which is all that generation keeps.
    `model.num_kv_heads` and `model.head_dim` have no effect on it.
    """

    module: ClassVar[str] = "lightning_llm.model.attention.latent:LatentAttention"
    kind: Literal["mla"] = "mla"
    q_rank: PositiveInt | None = Field(1536, description="elements of the latent of queries; null: no latent")
    kv_rank: PositiveInt = Field(512, description="elements of the latent of keys and values")
    nope_dim: PositiveInt = Field(128, description="elements of a head's keys without position")
    rope_dim: PositiveInt = Field(64, description="elements of the rotated key that all heads share; even")
    value_dim: PositiveInt = Field(128, description="elements of a head's values, at most nope_dim + rope_dim")
    interleaved: bool = Field(
        True, description="rotate pairs of neighboring elements, as DeepSeek's weights expect; false: of two halves"
    )
    norm_eps: PositiveFloat | None = Field(None, description="epsilon of the latents' norms; null: model.norm_eps")

    @property
    def key_width(self) -> int:
        """Elements of a head's keys."""
        return self.nope_dim + self.rope_dim

    def normed(self, model: ModelConfig) -> ModelConfig:
        """Return the model with the epsilon of the latents' norms."""
        return model if self.norm_eps is None else model.model_copy(update={"norm_eps": self.norm_eps})

    def heads(self, model: ModelConfig) -> Heads:
        return Heads(model.num_heads, model.num_heads, self.key_width, self.value_dim)

    def rope_width(self, model: ModelConfig) -> int:
        return self.rope_dim

    def cached_elements(self, model: ModelConfig) -> int:
        return self.kv_rank + self.rope_dim

    def context_elements(self, model: ModelConfig, width: int = 1) -> int:
        """Return the elements of the latent and the rotated key, which every tensor-parallel rank gathers whole."""
        return self.cached_elements(model)

    def linears(self, model: ModelConfig) -> list[LinearSpec]:
        heads, bias = model.num_heads, model.bias
        queries = _of_heads(heads, self.key_width, "nope_dim + rope_dim")
        latent = Size(self.kv_rank, f"{KEY}.kv_rank", 1, f"kv_rank={self.kv_rank}")
        both = self.kv_rank + self.rope_dim
        joined = Size(both, f"{KEY}.kv_rank", 1, f"kv_rank={self.kv_rank} + rope_dim={self.rope_dim}")
        expanded = _of_heads(heads, self.nope_dim + self.value_dim, "nope_dim + value_dim")
        values = _of_heads(heads, self.value_dim, "value_dim")
        if self.q_rank is None:
            made = [LinearSpec("q_proj", "column", queries, hidden(model), False)]
        else:
            rank = Size(self.q_rank, f"{KEY}.q_rank", 1, f"q_rank={self.q_rank}")
            made = [LinearSpec("q_a_proj", "duplicate", rank, hidden(model), bias)]
            made.append(LinearSpec("q_b_proj", "column", queries, rank, False))
        return [
            *made,
            LinearSpec("kv_a_proj", "duplicate", joined, hidden(model), bias),
            LinearSpec("kv_b_proj", "column", expanded, latent, False, all_tokens=True),
            LinearSpec("o_proj", "row", hidden(model), values, bias, depth_scaled=("gpt2", "llama")),
        ]

    def own_parameters(self, model: ModelConfig) -> list[ParameterSpec]:
        """Return the norms of the latents, of which each tensor-parallel rank sees its own heads' gradient."""
        sizes = {} if self.q_rank is None else {"q_a_norm": self.q_rank}
        sizes["kv_a_norm"] = self.kv_rank
        return [
            made._replace(name=f"{name}.{made.name}")
            for name, size in sizes.items()
            for made in norm_of(model).parameters_for(model, size, "per_head")
        ]

    def flops_per_token(self, model: ModelConfig, sequence_length: int) -> int:
        """Return the FLOPs per token of q k^T and of the product with v, forward and backward: 6 H (K + V) T."""
        seen = min(sequence_length, self.window or sequence_length)
        return 6 * model.num_heads * (self.key_width + self.value_dim) * seen

    def saved_tensors(self, model: ModelConfig, forward: ForwardPass) -> list[SavedTensor]:
        """Return the inputs of the linears and norms, the kernel's tensors and its output.

        Latents' norms save a view of kv_a_proj's output, so that its storage is kept whole. Values are a view of
        kv_b_proj's output, too; torch's kernels take a copy if they are narrower than keys (`attention.filled_up`).
        """
        width, heads = forward.width, model.num_heads
        first = ("kv_a_proj", "q_proj") if self.q_rank is None else ("kv_a_proj", "q_a_proj")
        kept = [SavedTensor("input", model.hidden_size, width, "gathered", linears=first)]
        if self.q_rank is not None:
            kept += self._normed(model, forward, "q", self.q_rank, self.q_rank)
            kept.append(SavedTensor("q_b_proj's input", self.q_rank, width, "gathered", linears=("q_b_proj",)))
        kept += self._normed(model, forward, "kv", self.kv_rank, self.kv_rank + self.rope_dim)
        latent = self.kv_rank
        if forward.context_ranks > 1:  # a view of all ranks' latents and rotated keys
            latent = (self.kv_rank + self.rope_dim) * forward.context_ranks
        kept.append(SavedTensor("kv_b_proj's input", latent, width, "gathered", linears=("kv_b_proj",)))
        own, fills = self.uses_short_kernel(forward), self.value_dim < self.key_width
        values = self.key_width if fills and not own else self.nope_dim + self.value_dim
        kept += [
            SavedTensor("queries", heads * self.key_width, width),
            SavedTensor("keys", heads * self.key_width * forward.context_ranks, width),
            SavedTensor("values", heads * values * forward.context_ranks, width),
            SavedTensor("mixed values", heads * self.value_dim, width, linears=("o_proj",), also=not fills),
        ]
        if own:
            return kept
        if fills:
            kept.append(SavedTensor("mixed values, filled up", heads * self.key_width, width))
        kept.append(SavedTensor("log-sum-exp", heads, 4))
        if self.is_masked(forward) and not forward.by_blocks:
            kept.append(mask_of(forward, width))
        return kept

    def _normed(self, model: ModelConfig, forward: ForwardPass, name: str, size: int, stored: int) -> list[SavedTensor]:
        """Return the tensors that a latent's norm saves; of its input the storage, `stored` elements."""
        made = []
        for each in norm_of(model).saved_for(size, forward):
            is_view = each.name == "input" and each.width == forward.width
            elements = stored if is_view else each.elements
            made.append(each._replace(name=f"{name} latent's {each.name}", elements=elements, split="gathered"))
        return made

    def kernel_outputs(self, model: ModelConfig, width: int, sequence_length: int) -> int:
        """Return the bytes that torch's kernels keep: mixed values of the keys' width, and one fp32 log-sum-exp."""
        return model.num_heads * (width * self.key_width + 4)

    def divisions(self, model: ModelConfig) -> dict[str, tuple[int, str]]:
        return {"model.num_heads": (model.num_heads, "each rank takes whole heads")}

    def memory_passes(self, model: ModelConfig, width: int, compiled: bool) -> list[MemoryPass]:
        """Return the passes of the latents' norms, the rotations, and the copies that join a head's two parts."""
        heads, wide = model.num_heads, 4  # fp32
        latents = width * (self.kv_rank + (self.q_rank or 0))
        turned = (heads + 1) * self.rope_dim
        each = 2 * width if compiled else (2 if self.interleaved else 0) * width + 2 * (width + wide) + 5 * wide
        joined = 2 * width * 2 * heads * self.key_width + width * heads * (self.value_dim + 2 * self.key_width)
        return [
            MemoryPass(2 * latents, 3 * latents, 1 if self.q_rank is None else 2),
            MemoryPass(turned * each, turned * each, 2 if compiled else 18),
            MemoryPass(joined, joined, 4),
        ]

    def problems(self, model: ModelConfig) -> Iterator[Problem]:
        if self.rope_dim % 2:
            text = "must be even: positions turn pairs of elements."
            yield Problem(f"{KEY}.rope_dim", f"{text} Use {self.rope_dim + 1}.", self.rope_dim)
        if self.value_dim > self.key_width:
            text = f"must be at most nope_dim + rope_dim = {self.key_width}: kernels take values as wide as keys."
            yield Problem(f"{KEY}.value_dim", text, self.value_dim)
        if model.position != "rope":
            text = f"is {model.position}, and kind=mla rotates rope_dim elements of its keys. Set it to rope."
            yield Problem("model.position", text)


def _of_heads(heads: int, each: int, text: str) -> Size:
    """Return the size of `heads` times `each` elements; `text` names the keys that make `each`."""
    return Size(heads * each, f"{text} of {KEY}", heads, f"model.num_heads={heads} x ({text} = {each})")
