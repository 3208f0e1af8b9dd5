"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout of Llama in transformers.

Element i of a head is paired with element i + K/2 (not with its neighbour i + 1), so weights interchange with
Hugging Face's as they are. Tables are made in fp32 on each forward: they are small, and a model without buffers has
nothing that meta construction, sharding or a checkpoint could lose.
"""

import math

import torch
from torch import Tensor

from lightning_llm.config.schema.model import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Return the K/2 angular frequencies in radians per position, fp32: `theta^(-2i/K)`, scaled as the config says."""
    size = config.attention_head_dim
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size  # [K/2]
    frequencies = 1.0 / config.rope_theta**exponents  # [K/2]
    return frequencies if config.rope_scaling is None else scale_frequencies(frequencies, config.rope_scaling)


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return `frequencies` stretched for a longer context, as Llama 3.1 does.

    Wavelengths longer than `original_sequence_length / low_frequency_factor` are stretched by `factor`, those shorter
    than `original_sequence_length / high_frequency_factor` stay, and between the two it interpolates (`apply_scaling`
    in meta-llama/llama-models, models/llama3/model.py; `_compute_llama3_parameters` in transformers).
    """
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_sequence_length * frequencies / (2 * math.pi)  # [K/2] full turns over the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # [K/2] 0: stretched, 1: as it was
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rope_tables(config: ModelConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles at `positions` `[T]` or `[B, T]`: two fp32 `[..., T, 1, K/2]`."""
    angles = positions.to(torch.float32)[..., None] * inverse_frequencies(config, positions.device)  # [..., T, K/2]
    return angles.cos()[..., None, :], angles.sin()[..., None, :]


class _Rotate(torch.autograd.Function):
    """Rotation of each pair by its angle; orthogonal, so the backward pass is the rotation by minus the angle."""

    @staticmethod
    def forward(ctx, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cosine, sine)
        return _rotate(x, cosine, sine)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        cosine, sine = ctx.saved_tensors
        return _rotate(grad_output, cosine, -sine), None, None


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.to(cosine.dtype).chunk(2, dim=-1)  # 2 x [B, T, H, K/2]
    turned = (
        torch.addcmul(first * cosine, second, -sine),  # [B, T, H, K/2]
        torch.addcmul(second * cosine, first, sine),  # [B, T, H, K/2]
    )
    return torch.cat(turned, dim=-1).to(x.dtype)  # [B, T, H, K]


def apply_rope(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return `x` `[B, T, H, K]` rotated by the tables of `rope_tables`, computed in fp32, in the dtype of `x`."""
    return _Rotate.apply(x, cosine, sine)
