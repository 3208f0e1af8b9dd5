"""A whole decoder of weights that are there, on one device, as judging and generating need it."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.linear import Linear


def whole_decoder(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    compute_dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    swap: Callable[[Decoder], object] = lambda model: None,
) -> Decoder:
    """Return a decoder of `config` whose parameters are `weights`, by our names, on `device` (None: the CPU).

    Activations are in `compute_dtype`, parameters in `dtype`. A tensor that is there already as it is wanted is taken
    over, not copied. `swap` replaces layers of the decoder while it is on the meta device.
    Raises RuntimeError where names or shapes are others than the decoder's.
    """
    with torch.device("meta"):
        model = Decoder(config, compute_dtype)
    swap(model)
    at = device or torch.device("cpu")
    model.load_state_dict({name: tensor.to(at, dtype) for name, tensor in weights.items()}, assign=True)
    return model


def frozen_decoder(
    config: ModelConfig, weights: Mapping[str, Tensor], compute_dtype: torch.dtype, device: torch.device
) -> Decoder:
    """Return a decoder of fp32 `weights` on `device` that is only asked, see `frozen`."""
    return frozen(whole_decoder(config, weights, compute_dtype, device=device), compute_dtype)


def frozen(model: Decoder, compute_dtype: torch.dtype) -> Decoder:
    """Return `model` in evaluation mode, its linears cast to `compute_dtype`: once, and not in every forward pass."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.to(compute_dtype)
    return model.eval().requires_grad_(False)
