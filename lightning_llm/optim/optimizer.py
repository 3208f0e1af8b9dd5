"""Parameter groups, the role and the decay of each parameter, and the state that an optimizer starts from."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_llm.config.schema.optim import OptimConfig, Role, role_in_block
from lightning_llm.linalg.local_part import local
from lightning_llm.optim.adamw_spec import AdamWFields

NamedParameters = Sequence[tuple[str, nn.Parameter]]


class AdamW(torch.optim.AdamW):
    """torch's AdamW, which works on this rank's shards: an update is element by element, of whichever elements.

    DTensor would look up anew, for each list of parameters and in each process, where the results of one fused kernel
    lie: half of a rank's first step. Bits are those of torch's own.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        """Fill `lists`, of parameters, gradients, moments and step counts, as torch does; then take their shards."""
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [local(each) for each in tensors]
        return has_complex


def adamw(
    parameters: Iterable[tuple[str, nn.Parameter]], config: AdamWFields, learning_rate: float | None = None
) -> AdamW:
    """Return AdamW over `parameters`; `learning_rate`: another peak than the config's.

    Fused kernels: one pass over parameter, gradient and both moments, on CPU and CUDA alike.
    """
    rate = config.learning_rate if learning_rate is None else learning_rate
    betas = (config.beta1, config.beta2)
    return AdamW(groups_of(parameters, config), lr=rate, betas=betas, eps=config.eps, fused=True)


def groups_of(parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> list[dict[str, Any]]:
    """Return parameter groups with their weight decay: the decayed one and the other, as far as they hold any."""
    decays = zip(decay_groups(parameters, config), (config.weight_decay, 0.0), strict=True)
    return [{"params": [each for _, each in named], "weight_decay": decay} for named, decay in decays if named]


def initialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter its state as it is before the first step: what an optimizer otherwise makes within that.

    Whoever asks a fresh optimizer for its state (torch.distributed.checkpoint does so by a step of learning rate 0)
    would leave it at step 1, with another bias correction from then on. An optimizer that has a method
    `initialise_state` does it by that. Others take a step of learning rate 0 over gradients of 0, which changes neither
    weights nor moments; their counters, `step` in a parameter's state and whatever is in a group, are put back.
    """
    if (own := getattr(optimizer, "initialise_state", None)) is not None:
        own()
        return
    groups = optimizer.param_groups
    before = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    for group in groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, values in zip(groups, before, strict=True):
        group.update(values)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], torch.Tensor) else 0


def decay_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig
) -> tuple[NamedParameters, NamedParameters]:
    """Return (decayed, undecayed): GPT-3's rule leaves norms, biases and embeddings out, each a key of its own."""
    groups: tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]] = ([], [])
    for name, parameter in parameters:
        groups[0 if _decays(name, parameter.ndim, config) else 1].append((name, parameter))
    return groups


def role_of(name: str, dimensions: int) -> Role:
    """Return the role of parameter `name` (its full name in a `Decoder`), which has so many dimensions."""
    if name.startswith("layers."):
        return role_in_block(dimensions)
    if dimensions == 1:
        return "vector"
    return "head" if name == "head.weight" else "embedding"


def _decays(name: str, dimensions: int, config: OptimConfig) -> bool:
    module, _, leaf = name.rpartition(".")
    if leaf == "bias":
        return config.decay_biases
    if "embedding" in module:
        return config.decay_embeddings
    if dimensions == 1:
        return config.decay_norms
    return True
