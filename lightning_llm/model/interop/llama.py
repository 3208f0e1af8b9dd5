"""LlamaForCausalLM."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.interop.architecture import (
    LLAMA_SIZES,
    PRE_NORM,
    Architecture,
    has_dividing_heads,
    is_plain,
    kinds_of,
    read_shape,
    shape_entries,
    windows_of,
)
from lightning_llm.model.interop.rope import rope_entries


class Llama(Architecture):
    """Llama 1 to 3, and the many models that took their shape."""

    class_name: ClassVar[str] = "LlamaForCausalLM"
    model_type: ClassVar[str] = "llama"
    shape: ClassVar[str] = "Llama (rmsnorm, rope, swiglu, no bias, num_heads divides hidden_size)"
    mixer: ClassVar[str] = "attention"
    switches: ClassVar[dict[str, bool]] = {"mlp_bias": False}
    """Entries of config.json that this class has and those that take its shape may not."""
    sizes: ClassVar[tuple[str, ...]] = LLAMA_SIZES
    wanted: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "sliding_window": (None,),
        "use_sliding_window": (False,),
    }
    not_null: ClassVar[tuple[str, ...]] = ("rms_norm_eps",)
    heads_divide: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Transformers' own, where config.json has no entry and ours are others."""

    def fits(self, config: ModelConfig) -> bool:
        return self._fits_but_for_windows(config) and windows_of(config) == {None} and has_dividing_heads(config)

    def _fits_but_for_windows(self, config: ModelConfig) -> bool:
        alike = (config.norm, config.position, config.bias) == ("rmsnorm", "rope", False)
        return alike and kinds_of(config) == {(self.mixer, "swiglu", False)} and is_plain(config)

    def block_names(self, config: ModelConfig, index: int) -> dict[str, str]:
        return PRE_NORM

    def entries(self, config: ModelConfig) -> dict[str, Any]:
        return {
            "architectures": [self.class_name],
            "model_type": self.model_type,
            "hidden_act": "silu",
            **self.switches,
            **shape_entries(config),
            **rope_entries(config),
        }

    def problems(self, values: Mapping[str, Any]) -> Iterator[Problem]:
        yield from super().problems(values)
        yield from self.layer_type_problems(values)

    def layer_type_problems(self, values: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield a problem if `layer_types` is given and some block is not full attention."""
        kinds = values.get("layer_types")
        if kinds is None:
            return
        if not isinstance(kinds, list) or len(kinds) != values.get("num_hidden_layers"):
            yield Problem("config.json layer_types", "must be a list with one kind per layer (num_hidden_layers).")
        elif odd := sorted({str(each) for each in kinds} - {"full_attention"}):
            yield Problem("config.json layer_types", f"has {', '.join(odd)}. Only full_attention is supported.")

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        mixer = {} if self.mixer == "attention" else {"layers": [self.mixer]}
        return {**read_shape(values, **self.defaults), **mixer}


WINDOW = 4096
"""Transformers' `sliding_window` where config.json has no entry. It counts the token itself, as `window` does."""
BLOCK = "attention_window"


class Mistral(Llama):
    """Llama's blocks, all with one window.

    Without a window it is exported as Llama, unless heads do not divide the width: transformers has no rule against
    that here.
    """

    class_name: ClassVar[str] = "MistralForCausalLM"
    model_type: ClassVar[str] = "mistral"
    shape: ClassVar[str] = "Mistral (Llama with one window in all blocks, or any num_heads)"
    switches: ClassVar[dict[str, bool]] = {}
    wanted: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    }
    not_null: ClassVar[tuple[str, ...]] = ("rms_norm_eps", "num_key_value_heads")
    heads_divide: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8}

    def fits(self, config: ModelConfig) -> bool:
        windows = windows_of(config)
        if not self._fits_but_for_windows(config) or len(windows) != 1:
            return False
        return windows != {None} or not has_dividing_heads(config)

    def entries(self, config: ModelConfig) -> dict[str, Any]:
        (window,) = windows_of(config)
        return {**super().entries(config), "sliding_window": window}

    def problems(self, values: Mapping[str, Any]) -> Iterator[Problem]:
        yield from super().problems(values)
        window = values.get("sliding_window", WINDOW)
        if window is not None and (type(window) is not int or window < 1):
            yield Problem("config.json sliding_window", "must be a whole number or null.", repr(window))
        uses = values.get("use_sliding_window", window is not None)
        if uses != (window is not None):
            text = f"is {uses!r}, and sliding_window is {window!r}, which decides here. Remove the wrong one."
            yield Problem("config.json use_sliding_window", text)

    def layer_type_problems(self, values: Mapping[str, Any]) -> Iterator[Problem]:
        if "layer_types" in values:
            text = "is set, so transformers would build a Ministral model. Remove it if all layers are equal."
            yield Problem("config.json layer_types", text)

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        shape = read_shape(values, **self.defaults)
        window = values.get("sliding_window", WINDOW)
        if window is None:
            return shape
        return {**shape, "blocks": {BLOCK: {"mixer": {"kind": "attention", "window": window}}}, "layers": [BLOCK]}


class Qwen3(Llama):
    """Llama's blocks with norms of queries and keys within each head."""

    class_name: ClassVar[str] = "Qwen3ForCausalLM"
    model_type: ClassVar[str] = "qwen3"
    shape: ClassVar[str] = "Qwen3 (Llama with qk_norm_attention)"
    mixer: ClassVar[str] = "qk_norm_attention"
    switches: ClassVar[dict[str, bool]] = {}
    wanted: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "use_sliding_window": (False,),
    }
    not_null: ClassVar[tuple[str, ...]] = ("rms_norm_eps", "head_dim")
    heads_divide: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {"head_dim": 128, "num_key_value_heads": 32}

    def fits(self, config: ModelConfig) -> bool:
        return self._fits_but_for_windows(config) and windows_of(config) == {None}

    def block_names(self, config: ModelConfig, index: int) -> dict[str, str]:
        return {**PRE_NORM, "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
