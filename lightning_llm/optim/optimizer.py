"""The optimizer and which parameters it decays."""

from collections.abc import Iterable

import torch
from torch import nn

from lightning_llm.config.schema import OptimConfig


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


def initialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter its moments, zeros, at step 0: what an optimizer otherwise makes within its first step.

    Whoever asks a fresh optimizer for its state (torch.distributed.checkpoint does so by a step of learning rate 0)
    would leave it at step 1, with another bias correction from then on.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()


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
