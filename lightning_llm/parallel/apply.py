"""THE order in which a bare model becomes the one that trains. Everything that reshapes a model is a line here."""

import torch

from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.activation import checkpoint_blocks
from lightning_llm.parallel.compile import compile_blocks
from lightning_llm.parallel.context import share_sequences
from lightning_llm.parallel.fully_shard import shard_decoder
from lightning_llm.parallel.gradient_sync import GradientSync
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.materialise import materialise
from lightning_llm.parallel.quantised import place_shards
from lightning_llm.parallel.tensor import shard_over_tensor_group
from lightning_llm.schema import PrecisionConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def apply_parallel(
    model: Decoder, layout: Layout, precision: PrecisionConfig, seed: int, sequence_length: int, device: torch.device
) -> GradientSync:
    """Take `model`, built on the meta device with its linears swapped, to the one that trains on this rank's `device`.

    `sequence_length`: tokens of the whole sequences that it will train on.
    Returns what sums its gradients over micro-batches and ranks.
    """
    model.to(DTYPES[precision.master_dtype])
    shard_over_tensor_group(model, layout)
    share_sequences(model, layout)
    place_shards(model, layout, sequence_length, device)
    checkpoint_blocks(model.blocks, layout.config)  # within the graph, so that the recomputation is compiled too
    if layout.config.compile:
        compile_blocks(model.blocks)
    scatters = []
    if layout.shards:
        compute, reduce = DTYPES[precision.compute_dtype], DTYPES[precision.reduce_dtype]
        scatters = shard_decoder(model, layout, compute, reduce)
    materialise(model, seed, device)
    return GradientSync(model, layout, scatters)
