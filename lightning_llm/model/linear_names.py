"""Names and sizes of a decoder's linear layers, without building it: what a precision recipe is checked against."""

from lightning_llm.schema.model import ModelConfig


def linear_names(config: ModelConfig) -> list[str]:
    """Return the full name of every `nn.Linear` of `Decoder(config)`, in module order; a tied head is none."""
    widen = ["gate_proj", "up_proj"] if config.activation == "swiglu" else ["up_proj"]
    block = [f"attention.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    block += [f"feed_forward.{name}" for name in (*widen, "down_proj")]
    inside = [f"layers.{index}.{name}" for index in range(config.num_layers) for name in block]
    return inside if config.tie_embeddings else [*inside, "head"]


def linear_inputs(config: ModelConfig) -> dict[str, int]:
    """Return every input size of a linear within a block, by the key, or the product of keys, that makes it."""
    width = config.attention_head_dim
    return {
        "model.hidden_size": config.hidden_size,
        "model.ffn_hidden_size": config.ffn_hidden_size,
        f"model.num_heads={config.num_heads} x head_dim={width}": config.num_heads * width,
    }


def linear_widths(config: ModelConfig) -> dict[str, int]:
    """Return every size that a linear within a block has on one of its sides, by the keys that make it."""
    heads, width = config.num_kv_heads, config.attention_head_dim
    return {**linear_inputs(config), f"model.num_kv_heads={heads} x head_dim={width}": heads * width}
