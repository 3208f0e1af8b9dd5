"""The optimizer and which parameters it decays."""

from collections.abc import Iterable

import torch
from torch import nn

from lightning_llm.schema import OptimConfig


def build_optimizer(parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> torch.optim.Optimizer:
    """Return the optimizer over (name, parameter) pairs, split into a decayed and an undecayed group.

    Fused kernels: one pass over parameter, gradient and both moments, on CPU and CUDA alike.
    """
    decayed, undecayed = decay_groups(parameters, config)
    groups = [
        {"params": [parameter for _, parameter in decayed], "weight_decay": config.weight_decay},
        {"params": [parameter for _, parameter in undecayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


NamedParameters = list[tuple[str, nn.Parameter]]


def decay_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig
) -> tuple[NamedParameters, NamedParameters]:
    """Return (decayed, undecayed): GPT-3's rule leaves norms, biases and embeddings out, each a key of its own."""
    groups: tuple[NamedParameters, NamedParameters] = ([], [])
    for name, parameter in parameters:
        groups[0 if _decays(name, parameter.ndim, config) else 1].append((name, parameter))
    return groups


def _decays(name: str, dimensions: int, config: OptimConfig) -> bool:
    module, _, leaf = name.rpartition(".")
    if leaf == "bias":
        return config.decay_biases
    if "embedding" in module:
        return config.decay_embeddings
    if dimensions == 1:
        return config.decay_norms
    return True
