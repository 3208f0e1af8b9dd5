"""From the meta device to memory: every rank fills its own shards, so no rank ever holds a whole copy."""

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import parameter_slice


@torch.no_grad()
def materialise(model: Decoder, seed: int, device: torch.device) -> None:
    """Put `model` on `device` with the weights of (seed, name): the same numbers however they are cut by rows."""
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        first_row, target = _rows(parameter) if isinstance(parameter, DTensor) else (0, parameter)
        start = first_row * parameter.shape[1:].numel()
        values = parameter_slice(model.config, seed, name, start, start + target.numel())
        target.copy_(values.view_as(target))


def _rows(parameter: DTensor) -> tuple[int, torch.Tensor]:
    """Return the first row, in the whole tensor, of this rank's shard, and the shard."""
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0], parameter.to_local()
