"""LlamaForCausalLM."""

from typing import Any, ClassVar

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.interop.architecture import (
    PRE_NORM,
    Architecture,
    is_plain,
    kinds_of,
    rope_entries,
    shape_entries,
)


class Llama(Architecture):
    """Llama 1 to 3, and the many models that took their shape."""

    class_name: ClassVar[str] = "LlamaForCausalLM"
    model_type: ClassVar[str] = "llama"
    shape: ClassVar[str] = "Llama (rmsnorm, rope, swiglu, no bias)"
    mixer: ClassVar[str] = "attention"
    switches: ClassVar[dict[str, bool]] = {"mlp_bias": False}
    """Entries of config.json that this class has and those that take its shape may not."""

    def fits(self, config: ModelConfig) -> bool:
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


ARCHITECTURE = Llama()
