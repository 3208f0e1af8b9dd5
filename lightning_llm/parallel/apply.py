"""Parallelize a model: the single place that fixes the order of all transformations of a bare model.

Every rank initializes only its own shards, from the meta device to memory, so no rank ever holds a whole copy
(`materialise`).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from lightning_llm.config.schema import PrecisionConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.dtypes import DTYPES
from lightning_llm.model.init import CHUNK_ELEMENTS, parameter_slice
from lightning_llm.parallel.axis import axes_on_ranks
from lightning_llm.parallel.blocks import checkpoint_blocks, compile_blocks
from lightning_llm.parallel.dp_shard import gather_codes, shard_decoder
from lightning_llm.parallel.gradient_sync import GradientSync
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.operand_shards import place_shards
from lightning_llm.parallel.pp import split_stages
from lightning_llm.parallel.torch_private import shard_offset

InitialSlice = Callable[[str, int, int], torch.Tensor]
"""(parameter name, start, stop) -> elements `start` to `stop` of the whole tensor, row-major, fp32, CPU."""
Fill = Callable[[Decoder, int, torch.device, InitialSlice | None], None]
"""Signature of `materialise`; a dry run passes another function."""
ELEMENTS_AT_ONCE = 64 * CHUNK_ELEMENTS


@torch.no_grad()
def materialise(model: Decoder, seed: int, device: torch.device, initial: InitialSlice | None = None) -> None:
    """Allocate `model`, built on the meta device, on `device` and set the initial values of this rank's shards.

    The values of a parameter are drawn from (`seed`, its name), or read from `initial`. They do not depend on the
    layout.
    """
    initial = initial or partial(parameter_slice, model.config, seed)
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        origin, target = _shard(parameter) if isinstance(parameter, DTensor) else ((0, 0), parameter)
        width = parameter.shape[1:].numel()  # of a row of the whole; a cut one has fewer elements
        for rows in target.split(max(1, ELEMENTS_AT_ONCE // width)):
            start = origin[0] * width
            values = initial(name, start, start + len(rows) * width)
            columns = slice(origin[1], origin[1] + rows.shape[1]) if rows.ndim > 1 else 0
            rows.copy_(values.view(len(rows), width)[:, columns])
            origin = (origin[0] + len(rows), origin[1])


def _shard(parameter: DTensor) -> tuple[tuple[int, int], torch.Tensor]:
    """Return the first row and column, in the whole tensor, of this rank's shard, and the shard."""
    offset = shard_offset(parameter)
    return (offset[0], offset[1] if len(offset) > 1 else 0), parameter.to_local()


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
    """Parallelize `model`, built on the meta device with its linears swapped, and place it on this rank's `device`.

    `sequence_length`: tokens of a whole training sequence. `initial`: source of the initial weights; None draws them
    from `seed`. `fill` places an initialized stage on the device. Returns one `GradientSync` per pipeline stage of this
    rank, one in total without a pipeline. With a pipeline, `model` keeps only this rank's part.
    """
    model.to(DTYPES[precision.master_dtype])
    syncs = []
    for stage in split_stages(model, layout):
        for axis in axes_on_ranks(layout):
            axis.cut(stage)
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
