"""torch.compile, block by block."""

from collections.abc import Mapping

from torch import nn


def compile_blocks(blocks: Mapping[str, nn.Module]) -> None:
    """Compile each block in place: equal blocks share one graph, so a deep model compiles as fast as a shallow one."""
    for block in blocks.values():
        block.compile()
