"""AdamW, and shared parts of all optimizers: parameter groups and roles, initial state, learning rate of a step."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from lightning_llm.config.schema import ScheduleConfig
from lightning_llm.config.schema.optim import OptimConfig, Role, role_in_block
from lightning_llm.linalg import local
from lightning_llm.optim.kinds import AdamWFields, learning_rate_factor

REGISTER_ELEMENTS = 32
"""Multiple of the elements of a CPU's vector register: AVX-512 has 16 in fp32, 32 in bf16."""


class WeightRounding(Protocol):
    """Protocol of methods that write updated weights to bf16 parameters; implemented by `train.weight_rounding`."""

    def initial_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the rounding's own optimizer state of a parameter, sharded like the parameter."""
        ...

    def update(
        self,
        parameter: nn.Parameter,
        state: dict[str, torch.Tensor],
        change: Callable[[torch.Tensor, slice], torch.Tensor],
    ) -> None:
        """Replace this rank's part of the weights by the results of `change`, rounded.

        `change` is called for pieces: fp32 weights [rows, ...], which it may write to, and their slice of the first
        axis. It returns the updated weights in fp32.
        """
        ...


class AdamW(torch.optim.AdamW):
    """torch's AdamW on this rank's shards, which is valid because updates are elementwise.

    DTensor would derive the placements of the fused kernel's results again for each list of parameters and in each
    process: half of a rank's first step. Results are bitwise those of torch's AdamW, except that the CPU kernel never
    sees a part of a vector register: it rounds the elements of such a rest otherwise, and which elements those are
    depends on the number of shards.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._filled: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.register_step_post_hook(_write_filled)

    def _init_group(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> bool:
        """Fill `lists`, of parameters, gradients, moments and step counts, as torch does; then take their shards."""
        has_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [self._whole_registers(local(each)) for each in tensors]
        return has_complex

    def _whole_registers(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`, or on a CPU a copy filled up with zeros to whole registers, written back after the step."""
        rest = -tensor.numel() % REGISTER_ELEMENTS
        if tensor.device.type != "cpu" or not tensor.ndim or not rest:  # step counts have no dimensions
            return tensor
        filled = F.pad(tensor.detach().flatten(), (0, rest))
        self._filled.append((tensor.detach(), filled))
        return filled

    def with_rounding(self, rounding: WeightRounding) -> "RoundedAdamW":
        """Return AdamW over the same parameters and options that writes weights by `rounding`."""
        return RoundedAdamW([{**group, "fused": False} for group in self.param_groups], rounding)


def _write_filled(optimizer: Any, args: Any, options: Any) -> None:
    """Write the results of a step of `AdamW` from filled up copies to its tensors."""
    for tensor, filled in optimizer._filled:
        tensor.copy_(filled[: tensor.numel()].view_as(tensor))
    optimizer._filled.clear()


class RoundedAdamW(torch.optim.AdamW):
    """AdamW in fp32 arithmetic for bf16 parameters: weights are rounded by `rounding`, moments to nearest.

    Its `step` calls none of torch's, which would run the hooks of a step twice. Its groups are not fused: torch would
    load their step counts onto the device, where the host would wait for each.
    """

    def __init__(self, groups: list[dict[str, Any]], rounding: WeightRounding):
        super().__init__(groups)
        self.rounding = rounding

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, local(parameter.grad), group)
        return loss

    def _update(self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        if not (state := self.state[parameter]):
            state["step"] = torch.zeros(())
            state |= {name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
            state |= self.rounding.initial_state(parameter)
        state["step"] += 1
        count, rate, decay = state["step"].item(), group["lr"], group["weight_decay"]
        kept = local(state["exp_avg"]), local(state["exp_avg_sq"])

        def change(weight: torch.Tensor, rows: slice) -> torch.Tensor:
            first, second = (moment[rows].float() for moment in kept)
            by = adamw_change(first, second, gradient[rows].float(), count, rate, group["betas"], group["eps"])
            for moment, new in zip(kept, (first, second), strict=True):
                moment[rows] = new.to(moment.dtype)
            return weight.mul_(1 - rate * decay).sub_(by)

        self.rounding.update(parameter, state, change)


def adamw_change(
    first: torch.Tensor,
    second: torch.Tensor,
    gradient: torch.Tensor,
    count: float,
    rate: float,
    betas: tuple[float, float],
    eps: float,
) -> torch.Tensor:
    """Return the fp32 tensor that AdamW subtracts from the decayed weights (Loshchilov & Hutter 2019, algorithm 2).

    The moments `first` and `second` are updated in place. `count`: number of updates including this one; `rate`: the
    learning rate. Each operation is rounded once, so a shard gets the bits of the whole.
    """
    beta1, beta2 = betas
    first.mul_(beta1).add_(gradient * (1 - beta1))
    second.mul_(beta2).add_(gradient.square().mul_(1 - beta2))
    denominator = second.sqrt().div_((1 - beta2**count) ** 0.5).add_(eps)
    return first.div(denominator).mul_(rate / (1 - beta1**count))


def adamw(
    parameters: Iterable[tuple[str, nn.Parameter]], config: AdamWFields, learning_rate: float | None = None
) -> AdamW:
    """Return AdamW over named `parameters` with the options of `config`; `learning_rate`: None: the config's.

    It uses fused kernels: one pass over parameter, gradient and both moments, on CPU and CUDA.
    """
    rate = config.learning_rate if learning_rate is None else learning_rate
    betas = (config.beta1, config.beta2)
    return AdamW(groups_of(parameters, config), lr=rate, betas=betas, eps=config.eps, fused=True)


def groups_of(parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> list[dict[str, Any]]:
    """Return torch's parameter groups: one with `weight_decay` of the config, then one without; empty ones are omitted.

    With `umup_depth` there is one for each learning rate.
    By default (GPT-3's rule) norms, biases and embeddings do not decay; `decay_norms`, `decay_biases` and
    `decay_embeddings` change that.
    """
    depth = getattr(config, "umup_depth", None)
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        factor = 1.0 if depth is None else umup_factor(name, parameter.shape, depth)
        groups.setdefault((not _decays(name, parameter.ndim, config), factor), []).append(parameter)
    made: list[dict[str, Any]] = []
    for (undecayed, factor), members in sorted(groups.items(), key=lambda group: group[0]):
        rate = {} if depth is None else {"lr": config.learning_rate * factor}
        made.append({"params": members, "weight_decay": 0.0 if undecayed else config.weight_decay, **rate})
    return made


def umup_factor(name: str, shape: torch.Size, depth: int) -> float:
    """Return u-muP's factor of AdamW's learning rate for a parameter of a decoder of `depth` layers."""
    role = role_of(name, len(shape))
    inputs = shape[-1] if role in ("hidden", "embedding") else 1
    return float((inputs * (depth if name.startswith("layers.") else 1)) ** -0.5)


def initialise_state(optimizer: torch.optim.Optimizer) -> None:
    """Initialize the state of every parameter before the first step.

    Optimizers create state in their first step. torch.distributed.checkpoint therefore makes a step of learning rate 0,
    which leaves them at step 1, with another bias correction. This function calls the optimizer's method
    `initialise_state` if it has one. Others make a step of learning rate 0 with gradients of 0, which changes neither
    weights nor moments; then their counters (`step` in a parameter's state, values of groups) are reset.
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


def role_of(name: str, dimensions: int) -> Role:
    """Return the role of the parameter with full name `name` in a `Decoder`: hidden, embedding, head or vector."""
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


class LearningRate:
    """Learning-rate schedule of one optimizer: sets the rate of each parameter group before an update (`set`).

    Each group's rate when this is created is its peak. It is stored here, because a checkpoint that is loaded into the
    optimizer later brings the rates of its last update.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: ScheduleConfig, max_steps: int):
        self.optimizer = optimizer
        self.schedule, self.max_steps = schedule, max_steps
        self.base_rates: list[float] = [group["lr"] for group in optimizer.param_groups]

    def set(self, updates: int) -> float:
        """Set every group's learning rate for the update after `updates` previous ones; return the first group's."""
        factor = learning_rate_factor(self.schedule, updates, self.max_steps)
        for group, base_rate in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = base_rate * factor
        return self.base_rates[0] * factor
