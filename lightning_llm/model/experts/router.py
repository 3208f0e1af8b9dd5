"""The router: scores of experts in fp32, the choice of k per token, weights, and the two losses of a micro-batch.

Letters: M tokens of a micro-batch, D hidden_size, E experts, k experts per token.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.linalg import local
from lightning_llm.model.experts.kinds import MoE, RouterConfig
from lightning_llm.model.structure import norm_of


class _Logits(torch.autograd.Function):
    """`x W^T` with both operands and the result in fp32 (fp64 for fp64), of which x is saved as it came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        wide = wide_dtype(x)
        return torch.mm(x.to(wide), weight.to(wide).t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        wide = gradient.dtype
        return torch.mm(gradient, weight.to(wide)).to(x.dtype), torch.mm(gradient.t(), x.to(wide)).to(weight.dtype)


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of routing: fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


class Router(nn.Module):
    """Logits of the choices by one linear.

    No gradient reaches the biases of the choice: `correction` `[E]` balances the loads, `skip_correction` `[1]` is of
    the choice of no expert; None without.
    """

    def __init__(self, kind: MoE, model: ModelConfig):
        super().__init__()
        corrects, skips = kind.router.bias_update_rate is not None, kind.router.skip
        self.experts = kind.experts
        self.score_by(kind, model)
        self.correction = nn.Parameter(torch.empty(kind.experts), requires_grad=False) if corrects else None
        self.skip_correction = nn.Parameter(torch.empty(1), requires_grad=False) if skips else None

    def score_by(self, kind: MoE, model: ModelConfig) -> None:
        """Create the parameters of the scores."""
        self.weight = nn.Parameter(torch.empty(kind.choices, model.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[M, E]`, fp32, of `x` `[M, D]`."""
        return self.normalise(x, self.weight, None)

    def normalise(self, x: Tensor, weight: Tensor, bias: None) -> Tensor:
        """Return the logits by `weight` `[E, D]`: the name that tensor parallelism calls replicated modules by.

        The weight is rounded to the dtype of `x` first, as FSDP2 gathers it and as Megatron-LM's 16-bit copy is.
        """
        logits: Tensor = _Logits.apply(x, weight.to(x.dtype))
        return logits

    @property
    def bias_of_choice(self) -> Tensor | None:
        """The local tensor of `correction`."""
        return local(self.correction)

    @property
    def biases(self) -> Tensor | None:
        """The biases of all choices, `[E]` or with the choice of none `[E + 1]`; None if there are none."""
        correction, skip = self.bias_of_choice, local(self.skip_correction)
        if skip is None:
            return correction
        return torch.cat([skip.new_zeros(self.experts) if correction is None else correction, skip])


class _Wide(nn.Module):
    """A linear in fp32 (fp64 for fp64): `y = x W^T + b`, with W and b rounded to the compute dtype first."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `[M, outputs]`, fp32, of `x` `[M, inputs]`."""
        y: Tensor = _Logits.apply(x, self.weight.to(dtype))
        return y if self.bias is None else y + self.bias.to(dtype).to(y.dtype)


class _Scale(nn.Module):
    """A learned vector that multiplies the state of the block before."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, state: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `[M, S]` of `state` `[M, S]`; the vector is rounded to `dtype` first."""
        return state * self.weight.to(dtype).to(state.dtype)


class DeepRouter(Router):
    """Logits by an MLP of three linears with GELU on a normed projection, the state `[M, S]` (ZAYA1, arXiv 2511.17127).

    With depth_mixing the state of the block before is added to it, times a vector. All is in fp32, see `Router`.
    """

    def score_by(self, kind: MoE, model: ModelConfig) -> None:
        size = kind.state_given(model)
        self.down_proj = _Wide(model.hidden_size, size)
        self.state_scale = _Scale(size) if kind.router.depth_mixing else None
        self.norm = norm_of(model).build_for(model, size)
        self.fc1, self.fc2 = _Wide(size, size), _Wide(size, size)
        self.out_proj = _Wide(size, kind.choices, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.with_state(x, None)[0]

    def with_state(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return logits `[M, E]` and the state `[M, S]` of `x` `[M, D]`; `before`: the state of the block before."""
        state, dtype = self.down_proj(x, x.dtype), x.dtype
        if before is not None and self.state_scale is not None:
            state = state + self.state_scale(before, dtype)
        norm: Any = self.norm
        bias = getattr(norm, "bias", None)
        inner = norm.normalise(state, norm.weight.to(dtype), None if bias is None else bias.to(dtype))
        for linear in (self.fc1, self.fc2):
            inner = F.gelu(linear(inner, dtype))
        return self.out_proj(inner, dtype), state


def scores_of(logits: Tensor, router: RouterConfig) -> Tensor:
    """Return scores `[M, E]` of fp32 `logits`."""
    return torch.softmax(logits, -1) if router.score == "softmax" else torch.sigmoid(logits)


@torch.no_grad()
def choose(scores: Tensor, per_token: int, router: RouterConfig, bias: Tensor | None = None) -> Tensor:
    """Return the chosen experts `[M, k]`, int64, in ascending order, of `scores` `[M, E]` with `bias` `[E]` added.

    Of equal scores the expert with the lower number is chosen: `torch.topk` promises no order. With `groups`, only
    experts of the groups with the largest sums of two scores are considered (DeepSeek-V3, arXiv 2412.19437, eq. 16).
    """
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if router.groups is not None and router.groups_chosen is not None:
        grouped = scores.unflatten(-1, (router.groups, -1))  # [M, G, E/G]
        best = _largest(grouped.topk(2, dim=-1).values.sum(-1), router.groups_chosen)  # [M, G']
        allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, value=True)  # [M, G]
        scores = grouped.masked_fill(~allowed[..., None], -math.inf).flatten(-2)
    return _largest(scores, per_token).sort(-1).values


def _largest(values: Tensor, count: int) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def weights_of(scores: Tensor, chosen: Tensor, router: RouterConfig) -> Tensor:
    """Return the weights `[M, k]` of the `chosen` experts: their scores, without the bias of the choice."""
    weights = scores.gather(-1, chosen)
    if router.normalise:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + 1e-20 if router.score == "sigmoid" else total)
    return weights * router.scale if router.scale != 1 else weights


def loads(chosen: Tensor, experts: int) -> Tensor:
    """Return how many times each of the experts is in `chosen` `[M, k]`: int64 `[E]`."""
    ends = torch.arange(experts + 1, device=chosen.device)
    return torch.searchsorted(chosen.flatten().sort().values, ends).diff()


def balance_loss(scores: Tensor, load: Tensor, kind: MoE, parts: int = 1) -> Tensor:
    """Return `alpha E sum_e f_e P_e`: f the shares of the choices, P the mean scores (arXiv 2101.03961, eq. 4 to 6).

    Sigmoid scores are divided by their sum over experts first, as Megatron-LM's
    `compute_routing_scores_for_aux_loss` does. `scores` `[M, E]` may be one of `parts` equal parts of the tokens that
    `load` counts: the mean over the parts is then the loss, because f has no gradient.
    """
    shares = load.to(scores.dtype) / (parts * len(scores) * kind.per_token)  # [E]
    if kind.router.score == "sigmoid":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return kind.balance_loss * kind.experts * (shares * scores.mean(0)[: kind.experts]).sum()


def z_loss(logits: Tensor, weight: float) -> Tensor:
    """Return `beta mean_t logsumexp(l_t)^2` (ST-MoE, arXiv 2202.08906, eq. 5)."""
    return weight * torch.logsumexp(logits, -1).square().mean()


class Choices(NamedTuple):
    """The choices of a micro-batch's tokens. `kept`: bool `[M, k]`, those that an expert takes; None if all are.

    A choice of no expert has the number E.
    """

    chosen: Tensor
    weights: Tensor
    kept: Tensor | None


@torch.no_grad()
def within_capacity(chosen: Tensor, weights: Tensor, kind: MoE) -> Tensor | None:
    """Return which choices `[M, k]` the experts take; None without a capacity.

    An expert takes `ceil(k M / E x capacity_factor)` (Megatron-LM's `get_capacity`): those of largest weight, or the
    first; of equal weights the first.
    """
    if kind.capacity_factor is None:
        return None
    flat = chosen.flatten()
    capacity = math.ceil(len(flat) / kind.experts * kind.capacity_factor)
    order = torch.arange(len(flat), device=flat.device)
    if kind.drop == "weight":
        order = weights.flatten().sort(descending=True, stable=True).indices
    by_expert, inner = flat[order].sort(stable=True)
    first = torch.searchsorted(by_expert, torch.arange(kind.choices, device=flat.device))
    rank = torch.arange(len(flat), device=flat.device) - first[by_expert]
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order[inner]] = rank < capacity
    return kept.view_as(chosen)
