"""MistralForCausalLM."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.interop.architecture import has_dividing_heads, read_shape, windows_of
from lightning_llm.model.interop.llama import Llama

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
            yield Problem("config.json sliding_window", f"is {window!r}, and must be a whole number or null.")
        uses = values.get("use_sliding_window", window is not None)
        if uses != (window is not None):
            text = f"is {uses!r}, and sliding_window is {window!r}, which decides here. Remove the wrong one."
            yield Problem("config.json use_sliding_window", text)

    def layer_type_problems(self, values: Mapping[str, Any]) -> Iterator[Problem]:
        if "layer_types" in values:
            text = "is given, with which transformers makes a Ministral model of this one. Remove it, if all are alike."
            yield Problem("config.json layer_types", text)

    def read(self, values: Mapping[str, Any]) -> dict[str, Any]:
        shape = read_shape(values, **self.defaults)
        window = values.get("sliding_window", WINDOW)
        if window is None:
            return shape
        return {**shape, "blocks": {BLOCK: {"mixer": {"kind": "attention", "window": window}}}, "layers": [BLOCK]}


ARCHITECTURE = Mistral()
