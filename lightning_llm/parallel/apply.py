"""THE order in which a bare model becomes the one that trains. Everything that reshapes a model is a line here."""

from collections.abc import Mapping

from torch import nn

from lightning_llm.parallel.activation import checkpoint_blocks
from lightning_llm.parallel.compile import compile_blocks
from lightning_llm.schema import ParallelConfig


def apply_parallel(blocks: Mapping[str, nn.Module], config: ParallelConfig) -> None:
    """Apply `config` to the model's blocks, built on the meta device and not yet materialised."""
    if config.activation_checkpoint == "full":
        checkpoint_blocks(blocks)  # inside the compiled graph, so that the recomputation is compiled too
    if config.compile:
        compile_blocks(blocks)
