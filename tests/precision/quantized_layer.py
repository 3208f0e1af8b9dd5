"""A quantised linear layer, its operands, and one pass through it."""

import torch

from lightning_llm.precision.linear.module import QuantizedLinear
from lightning_llm.precision.linear.plan import LinearPlan

M, K, N = 192, 256, 128


def layer_of(recipe, bias=False, n=N, k=K, seed=0):
    torch.manual_seed(seed)
    linear = torch.nn.Linear(k, n, bias=bias)
    return QuantizedLinear("layers.0.q_proj", linear, LinearPlan.from_recipe(recipe, "eager"))


def tensors(dtype, wide=False):
    """X with a few outlier channels, dY with rows of very different size; `wide`: columns over eight decades."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(M, K, generator=generator)
    x[:, ::37] *= 20
    dy = torch.randn(M, N, generator=generator) * torch.logspace(-4, -1, M)[:, None]
    if wide:
        x *= torch.logspace(-4, 4, K)[torch.randperm(K, generator=generator)]
        dy *= torch.logspace(-4, 4, N)[torch.randperm(N, generator=generator)]
    return x.to(dtype), dy.to(dtype)


def run(layer, x, dy):
    x = x.clone().requires_grad_()
    layer.weight.grad = None
    y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad
