"""From the meta device to memory: every rank fills its own shards, so no rank ever holds a whole copy."""

from collections.abc import Callable
from functools import partial

import torch
from torch.distributed.tensor import DTensor

from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import CHUNK_ELEMENTS, parameter_slice
from lightning_llm.parallel.torch_private import shard_offset

InitialSlice = Callable[[str, int, int], torch.Tensor]
"""Of a parameter's name, `start` and `stop`: its elements between them, row-major over the whole tensor, fp32, CPU."""
Fill = Callable[[Decoder, int, torch.device, InitialSlice | None], None]
"""`materialise`, or what stands for it where nothing is to be computed."""
ELEMENTS_AT_ONCE = 64 * CHUNK_ELEMENTS


@torch.no_grad()
def materialise(model: Decoder, seed: int, device: torch.device, initial: InitialSlice | None = None) -> None:
    """Put `model` on `device` with the weights of (seed, name), or `initial`: the same numbers however they are cut."""
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
