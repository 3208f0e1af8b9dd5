"""The router: scores of experts in fp32, the choice of k per token, weights, and the two losses of a micro-batch.

Letters: M tokens of a micro-batch, D hidden_size, E experts, k experts per token.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_llm.linalg import local
from lightning_llm.model.experts.kinds import MoE, RouterConfig


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
    """Logits of the experts. `correction` `[E]`: the bias of the choice, which no gradient reaches; None without."""

    def __init__(self, experts: int, hidden_size: int, corrects: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden_size))
        self.correction = nn.Parameter(torch.empty(experts), requires_grad=False) if corrects else None

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


def balance_loss(scores: Tensor, load: Tensor, kind: MoE) -> Tensor:
    """Return `alpha E sum_e f_e P_e`: f the shares of the choices, P the mean scores (arXiv 2101.03961, eq. 4 to 6).

    Sigmoid scores are divided by their sum over experts first, as Megatron-LM's
    `compute_routing_scores_for_aux_loss` does.
    """
    shares = load.to(scores.dtype) / (len(scores) * kind.per_token)  # [E]
    if kind.router.score == "sigmoid":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return kind.balance_loss * kind.experts * (shares * scores.mean(0)).sum()


def z_loss(logits: Tensor, weight: float) -> Tensor:
    """Return `beta mean_t logsumexp(l_t)^2` (ST-MoE, arXiv 2202.08906, eq. 5)."""
    return weight * torch.logsumexp(logits, -1).square().mean()


class Choices(NamedTuple):
    """The choices of a micro-batch's tokens. `kept`: bool `[M, k]`, None where no choice is dropped."""

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
    first = torch.searchsorted(by_expert, torch.arange(kind.experts, device=flat.device))
    rank = torch.arange(len(flat), device=flat.device) - first[by_expert]
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order[inner]] = rank < capacity
    return kept.view_as(chosen)
