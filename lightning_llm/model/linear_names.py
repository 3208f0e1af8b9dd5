"""Names, roles and sizes of a decoder's linear layers, without building it: what is checked before anything starts."""

from typing import NamedTuple

from lightning_llm.config.schema.model import ModelConfig

ATTENTION_ROLES = {"q_proj": "column", "k_proj": "column", "v_proj": "column", "o_proj": "row"}
FEED_FORWARD_ROLES = {
    "swiglu": {"gate_proj": "column", "up_proj": "column", "down_proj": "row"},
    "gelu": {"up_proj": "column", "down_proj": "row"},
}
"""How a tensor-parallel group shares each linear (`Decoder.roles`), by its name within its part, in module order."""


class BlockLinear(NamedTuple):
    """A linear of a block: its `name` within the block ("attention.q_proj"), its role, its sizes."""

    name: str
    role: str
    out_features: int
    in_features: int


def block_linears(config: ModelConfig) -> list[BlockLinear]:
    """Return the linears of one block of `Decoder(config)`, in module order."""
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    query, key = config.num_heads * config.attention_head_dim, config.num_kv_heads * config.attention_head_dim
    inside = {"q_proj": query, "k_proj": key, "v_proj": key, "o_proj": query, "gate_proj": ffn, "up_proj": ffn}
    inside["down_proj"] = ffn
    parts = {"attention": ATTENTION_ROLES, "feed_forward": FEED_FORWARD_ROLES[config.activation]}
    return [
        BlockLinear(f"{part}.{name}", role, *((hidden, inside[name]) if role == "row" else (inside[name], hidden)))
        for part, roles in parts.items()
        for name, role in roles.items()
    ]


def linear_names(config: ModelConfig) -> list[str]:
    """Return the full name of every `nn.Linear` of `Decoder(config)`, in module order; a tied head is none."""
    block = block_linears(config)
    inside = [f"layers.{index}.{linear.name}" for index in range(config.num_layers) for linear in block]
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
