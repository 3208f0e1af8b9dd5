"""Unit scaling: factors by which weights, activations and their gradients begin with a standard deviation near 1.

Blake, Orr and Luschi 2023 (arXiv 2303.11257); the residual and attention rules of u-muP (Blake et al. 2024,
arXiv 2407.17465). Weights begin as N(0, 1). A factor may differ between the forward and the backward pass. Each pair
changes the gradient of a parameter by a constant only, which AdamW ignores. The constants are those of the
`unit-scaling` package 0.3 (tests compare), except for three that change no ratio within a tensor: gradients of
parameters are not divided by the root of the number of tokens, the loss scale stands for the loss function's backward
factor, and the factor of attention is that of `max_sequence_length`, so that a token's logits do not depend on how many
tokens come at once.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_llm.config.schema.model import ModelConfig


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_factor = backward
        return x.view_as(x) if forward == 1.0 else x * forward

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        factor = ctx.backward_factor
        return grad_output if factor == 1.0 else grad_output * factor, None, None


def scaled(x: Tensor, forward: float = 1.0, backward: float = 1.0) -> Tensor:
    """Return `x` times `forward`; its gradient is the output's times `backward`."""
    y: Tensor = _Scale.apply(x, forward, backward)
    return y


def scaled_linear(linear: Callable[[Tensor], Tensor], x: Tensor, inputs: int) -> Tensor:
    """Return `linear(x)` / sqrt(inputs) and its gradient by `x`, of a linear with weights of variance 1.

    The linear itself sees `x` and the gradient of the output, both with a deviation near 1. `inputs`: of the whole
    weight, also if a rank has a shard.
    """
    factor = inputs**-0.5
    return scaled(linear(scaled(x, backward=factor)), forward=factor)


SWIGLU = 0.5 * math.log(2) + 0.5 * math.log(2**0.5)
SWIGLU_FACTOR = math.exp(SWIGLU)
"""Inverse deviation of `silu(g) u` for Gaussian g and u: halfway, in logarithms, between 2 and sqrt(2)."""


def scaled_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up` with unit deviation."""
    gate, up = scaled(gate, backward=SWIGLU_FACTOR), scaled(up, backward=SWIGLU_FACTOR)
    return scaled(torch.nn.functional.silu(gate) * up, forward=SWIGLU_FACTOR)


def attention_factor(config: ModelConfig) -> float:
    """Return the inverse deviation of causal attention's output, an empirical model (u-muP, appendix)."""
    tokens = config.max_sequence_length
    one_hot = 1 / (1 + 4 * config.attention_head_dim)
    return math.exp((1 - one_hot) * -0.5 * math.log(math.log(tokens) / tokens))


def residual_ratios(config: ModelConfig, index: int) -> tuple[float, float]:
    """Return tau of the mixer and of the feed-forward network of block `index`: their weight over that of the stream.

    So that the embedding, all mixers and all feed-forward networks contribute equally to the last block's output.
    """
    first, second = ((config.num_layers + 2 * index + part) ** -0.5 for part in (0, 1))
    return first, second


def branch_input(x: Tensor, tau: float) -> Tensor:
    """Return the stream `x` as the input of a residual branch; see `residual_sum`."""
    return scaled(x, backward=tau / math.hypot(1, tau))


def residual_sum(x: Tensor, branch: Tensor, tau: float) -> Tensor:
    """Return `(x + tau branch) / sqrt(1 + tau^2)`.

    The gradient of `branch` is not multiplied by tau; `branch_input` does that behind the branch, so that gradients
    within it have unit deviation.
    """
    whole = math.hypot(1, tau)
    return x * (1 / whole) + scaled(branch, forward=tau / whole)
