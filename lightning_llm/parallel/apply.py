"""THE order in which a bare model becomes the one that trains. Everything that reshapes a model is a line here."""

import torch

from lightning_llm.config.schema import PrecisionConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.dtypes import DTYPES
from lightning_llm.parallel.activation import checkpoint_blocks
from lightning_llm.parallel.compile import compile_blocks
from lightning_llm.parallel.context import share_sequences
from lightning_llm.parallel.fully_shard import shard_decoder
from lightning_llm.parallel.gradient_sync import GradientSync
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.materialise import Fill, InitialSlice, materialise
from lightning_llm.parallel.pipeline import split_stages
from lightning_llm.parallel.quantised import place_shards
from lightning_llm.parallel.quantised_gather import gather_codes
from lightning_llm.parallel.tensor import shard_over_tensor_group


def apply_parallel(
    model: Decoder,
    layout: Layout,
    precision: PrecisionConfig,
    seed: int,
    sequence_length: int,
    device: torch.device,
    initial: InitialSlice | None = None,
    fill: Fill = materialise,
) -> list[GradientSync]:
    """Take `model`, built on the meta device with its linears swapped, to the one that trains on this rank's `device`.

    `sequence_length`: tokens of the whole sequences that it will train on. `initial`: what gives the weights; None: the
    seed. `fill` puts a stage with them on the device. Returns what sums the gradients of each of this rank's pipeline
    stages over micro-batches and ranks: one, of the whole model, where there is no pipeline. With one, `model` keeps
    this rank's part alone.
    """
    model.to(DTYPES[precision.master_dtype])
    syncs = []
    for stage in split_stages(model, layout):
        shard_over_tensor_group(stage, layout)
        share_sequences(stage, layout)
        place_shards(stage, layout, sequence_length, device)
        checkpoint_blocks(stage.blocks, layout.config)  # within the graph, so that the recomputation is compiled too
        if layout.config.compile:
            compile_blocks(stage.blocks)
        scatters = []
        if layout.shards:
            gathered, reduce = DTYPES[precision.gather_dtype], DTYPES[precision.reduce_dtype]
            scatters = shard_decoder(stage, layout, gathered, reduce)
        fill(stage, seed, device, initial)
        if layout.shards and precision.parameter_gather == "quantised":
            gather_codes(stage, layout, DTYPES[precision.compute_dtype])
        syncs.append(GradientSync(stage, layout, scatters))
    return syncs
