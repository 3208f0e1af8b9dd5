"""Names, roles and sizes of a decoder's linear layers, without building it: what is checked before anything starts."""

from functools import lru_cache

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.block_spec import Same, block_parts, for_layers
from lightning_llm.model.spec import LinearSpec


def block_linears(config: ModelConfig, index: int) -> list[LinearSpec]:
    """Return the linears of block `index` of `Decoder(config)`, in module order; names are those within the block."""
    return [
        linear._replace(name=f"{part_name}.{linear.name}")
        for part_name, part in block_parts(config, index).items()
        for linear in part.linears(config)
    ]


def linears_of(config: ModelConfig) -> dict[str, LinearSpec]:
    """Return the linears of all blocks by full name, in module order."""
    layers = range(config.num_layers)
    by_layer = for_layers(config, layers, lambda index: block_linears(config, index))
    return {f"layers.{index}.{linear.name}": linear for index in layers for linear in by_layer[index]}


def linear_names(config: ModelConfig) -> list[str]:
    """Return the full name of every `nn.Linear` of `Decoder(config)`, in module order; a tied head is none."""
    return [*linears_of(config), *([] if config.tie_embeddings else ["head"])]


def has_bias(config: ModelConfig) -> bool:
    """Return whether any linear within a block has a bias."""
    return any(linear.bias for linear in linears_of(config).values())


def linear_widths(config: ModelConfig) -> dict[str, int]:
    """Return every size that a linear within a block has on one of its sides, by the keys that make it."""
    return dict(_widths(Same(config)))


@lru_cache(maxsize=64)
def _widths(same: Same) -> dict[str, int]:
    sides = (side for linear in linears_of(same.model).values() for side in (linear.inputs, linear.outputs))
    return {side.text: side.length for side in sides}
