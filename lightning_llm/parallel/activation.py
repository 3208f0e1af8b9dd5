"""Activation checkpointing: recompute a block in the backward pass instead of keeping what it computed."""

from collections.abc import Mapping
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_llm.precision.module import recompute_contexts


def checkpoint_blocks(blocks: Mapping[str, nn.Module]) -> None:
    """Make every block recompute its forward pass (Chen et al. 2016). Names of parameters do not change."""
    for block in blocks.values():
        # The model draws no torch random numbers, so there is no generator state to carry into the recomputation; the
        # keys of stochastic rounding are, by the context.
        block.forward = partial(
            checkpoint,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=recompute_contexts(block),
        )
