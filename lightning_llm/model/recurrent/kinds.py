"""The recurrent mixers that a config chooses: shapes, memory and costs. Imports no torch.

Letters: D hidden_size, H heads, K and V elements of a head's keys and values.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

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


@MIXERS.register
class GLA(Mixer):
    """Gated linear attention (Yang et al. 2024, arXiv:2312.06635); keys and defaults are flash-linear-attention's."""

    module: ClassVar[str] = "lightning_llm.model.recurrent.gla:GLA"
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
