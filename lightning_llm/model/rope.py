"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout of Llama in transformers.

Element i of a head is paired with element i + K/2 (not with its neighbour i + 1), so weights interchange with
Hugging Face's as they are. Tables are made in fp32 on each forward: they are small, and a model without buffers has
nothing that meta construction, sharding or a checkpoint could lose.
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_llm.config.schema.model import ModelConfig, RopeScaling

SHARING_SEQUENCES = 4
"""Smallest number of sequences with equal positions for which expanding the tables over heads pays."""


def inverse_frequencies(config: ModelConfig, device: torch.device, size: int) -> Tensor:
    """Return the K/2 angular frequencies in radians per position, fp32: `theta^(-2i/K)`, scaled by the config.

    `size`: the K elements of a head that are rotated.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size  # [K/2]
    frequencies = 1.0 / config.rope_theta**exponents  # [K/2]
    if config.rope_scaling is None:
        return frequencies
    if config.rope_scaling.name == "yarn":
        return yarn_frequencies(frequencies, config.rope_scaling, config.rope_theta)
    return scale_frequencies(frequencies, config.rope_scaling)


def scale_frequencies(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return `frequencies` stretched for a longer context, for every kind of `scaling` except yarn.

    - "linear": all divided by `factor` (position interpolation, Chen et al. 2023, arXiv:2306.15595).
    - "dynamic": as they are. Transformers' NTK scaling stretches them beyond `max_position_embeddings` alone, which is
      `max_sequence_length` here, and no longer sequence is taken.
    - "llama3": wavelengths longer than `original_sequence_length / low_frequency_factor` are stretched by `factor`,
      those shorter than `original_sequence_length / high_frequency_factor` stay, and between the two it interpolates
      (`apply_scaling` in meta-llama/llama-models, models/llama3/model.py; transformers' `_compute_llama3_parameters`).
    """
    if scaling.name == "linear":
        return frequencies / scaling.factor
    if scaling.name == "dynamic":
        return frequencies
    low, high = scaling.low_frequency_factor or 1.0, scaling.high_frequency_factor or 1.0  # given, by the schema
    turns = (scaling.original_sequence_length or 0) * frequencies / (2 * math.pi)  # [K/2] over the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # [K/2] 0: stretched, 1: as it was
    return frequencies * (kept + (1 - kept) / scaling.factor)


def yarn_frequencies(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Return `frequencies` `[K/2]` stretched by YaRN's ramp (Peng et al. 2023, arXiv:2309.00071, section 3.2).

    Pairs that make more than `beta_fast` turns over the original context stay, those below `beta_slow` are divided by
    `factor`; between the two the ramp is linear in the pair's index, as in transformers' `_compute_yarn_parameters`.
    """
    size, length = 2 * len(frequencies), scaling.original_sequence_length or 0

    def index_of(turns: float) -> float:
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index_of(scaling.beta_fast or 32), index_of(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high = high + 0.001 if high == low else high
    index = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)  # [K/2]
    kept = 1 - ((index - low) / (high - low)).clamp(0, 1)  # [K/2] 0: stretched, 1: as it was
    return frequencies / scaling.factor * (1 - kept) + frequencies * kept


def attention_factor(scaling: RopeScaling | None) -> float:
    """Return the factor of cosine and sine: YaRN's temperature of the softmax (its equation 22), else 1."""
    if scaling is None or scaling.name != "yarn":
        return 1.0
    if scaling.mscale is not None:
        return magnitude(scaling.factor, scaling.mscale) / magnitude(scaling.factor, scaling.mscale_all_dim or 0.0)
    return scaling.attention_factor or magnitude(scaling.factor, 1.0)


def magnitude(factor: float, m: float) -> float:
    """Return `0.1 m ln(factor) + 1`, or 1 where the context is not stretched (DeepSeek's `yarn_get_mscale`)."""
    return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0


def score_factor(scaling: RopeScaling | None) -> float:
    """Return the factor of the scores of latent attention: the square of the magnitude by `mscale_all_dim`, else 1."""
    if scaling is None or scaling.mscale_all_dim is None:
        return 1.0
    return magnitude(scaling.factor, scaling.mscale_all_dim) ** 2


def rope_tables(config: ModelConfig, positions: Tensor, size: int | None = None) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles at `positions` `[T]` or `[B, T]`: two fp32 `[..., T, 1, K/2]`.

    `size`: the K elements of a head that are rotated; None: all of `attention_head_dim`.
    """
    frequencies = inverse_frequencies(config, positions.device, size or config.attention_head_dim)  # [K/2]
    angles = positions.to(torch.float32)[..., None] * frequencies  # [..., T, K/2]
    cosine, sine = angles.cos()[..., None, :], angles.sin()[..., None, :]
    factor = attention_factor(config.rope_scaling)
    return (cosine, sine) if factor == 1.0 else (cosine * factor, sine * factor)


class _Rotate(torch.autograd.Function):
    """Rotation of each pair by its angle, with optional scaling. The backward pass rotates by the negative angle."""

    @staticmethod
    def forward(ctx, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cosine, sine)
        return _rotate(x, cosine, sine)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        cosine, sine = ctx.saved_tensors
        return _rotate(grad_output, cosine, -sine), None, None


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    wide = x.to(cosine.dtype)  # [B, T, H, K]
    if torch.compiler.is_compiling():  # a compiler joins the halves by itself
        first, second = wide.chunk(2, dim=-1)  # 2 x [B, T, H, K/2]
        turned = (
            torch.addcmul(first * cosine, second, -sine),  # [B, T, H, K/2]
            torch.addcmul(second * cosine, first, sine),  # [B, T, H, K/2]
        )
        return torch.cat(turned, dim=-1).to(x.dtype)  # [B, T, H, K]
    # An inner loop covers the contiguous part of all operands: K/2 numbers, or a whole sequence with expanded tables.
    by_sequence = x.device.type == "cpu" and cosine.ndim == 3 and len(x) >= SHARING_SEQUENCES
    heads = x.shape[2] if by_sequence else 1
    sine = sine.expand(*sine.shape[:-2], heads, -1).contiguous()  # [.., T, heads, K/2]
    cosines = cosine[..., None, :].expand(*cosine.shape[:-2], heads, 2, -1).contiguous()  # [.., T, heads, 2, K/2]
    out = torch.empty(x.shape, dtype=cosine.dtype, device=x.device)  # [B, T, H, K]
    halves, turned_halves = wide.unflatten(-1, (2, -1)), out.unflatten(-1, (2, -1))  # 2 x [B, T, H, 2, K/2]
    torch.mul(halves, cosines, out=turned_halves)
    turned_halves[..., 0, :].addcmul_(halves[..., 1, :], -sine)
    turned_halves[..., 1, :].addcmul_(halves[..., 0, :], sine)
    return out.to(x.dtype)


def apply_rope(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return `x` `[B, T, H, K]` rotated by the tables of `rope_tables`, computed in fp32, in the dtype of `x`."""
    return _Rotate.apply(x, cosine, sine)
