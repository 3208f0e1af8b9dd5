"""The mixture of experts as a module: router, experts, shared experts, and the counts of a step.

Letters: M tokens of a micro-batch, D hidden_size, E experts, k experts per token.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.linalg import local
from lightning_llm.linalg.grouped import GroupedLinear, Groups
from lightning_llm.model.experts.dispatch import combine, dispatch, place
from lightning_llm.model.experts.kinds import BALANCE, ROUTER_Z, MoE
from lightning_llm.model.experts.router import (
    Choices,
    DeepRouter,
    Router,
    balance_loss,
    choose,
    loads,
    scores_of,
    weights_of,
    within_capacity,
    z_loss,
)
from lightning_llm.model.feed_forward import DenseFeedForward
from lightning_llm.model.kinds import SwiGLU


class Experts(nn.Module):
    """The SwiGLUs of E experts. A tensor-parallel rank holds whole experts, from number `first` on."""

    first = 0
    breaks_graph = True  # compiled blocks run this module as it is, because sizes of products depend on the data

    def __init__(self, experts: int, hidden_size: int, inner: int):
        super().__init__()
        self.count, self.inner = experts, inner
        self.gate_proj = GroupedLinear(experts, hidden_size, inner)
        self.up_proj = GroupedLinear(experts, hidden_size, inner)
        self.down_proj = GroupedLinear(experts, inner, hidden_size)

    @property
    def local_count(self) -> int:
        """Experts on this rank."""
        return len(local(self.gate_proj.weight)) // self.inner

    @property
    def held(self) -> tuple[int, int]:
        """Number of the first expert that this rank's outputs are of, and how many there are."""
        return self.first, self.local_count

    def forward(self, x: Tensor, choices: Choices) -> Tensor:
        """Return `[B, T, D]` for `x` `[B, T, D]`: the weighted sums over the experts that are `held`."""
        first, experts = self.held
        placement = place(choices.chosen, choices.kept, experts, first, self.count, self.gate_proj.row_multiple)
        rows = dispatch(x.flatten(0, -2), placement)  # [R, D]
        return combine(self.outputs_of(rows, placement.groups), choices.weights, placement).view_as(x)

    def outputs_of(self, rows: Tensor, groups: Groups) -> Tensor:
        """Return the experts' outputs `[R, D]` of `rows` `[R, D]`, sorted by expert as `groups` divides them."""
        given = groups, self.first
        inner = F.silu(self.gate_proj(rows, *given)) * self.up_proj(rows, *given)  # [R, F]
        y: Tensor = self.down_proj(inner, *given)
        return y

    def step(self, x: Tensor, choices: Choices) -> Tensor:
        """Return the same, by products over all of `x` for each expert that a token chose, without gradients.

        Each row is computed in its own place of a product of one shape (`model.stepping`), whoever else chose the same
        expert.
        """
        total = torch.zeros_like(x, dtype=choices.weights.dtype)
        for expert in sorted(set(choices.chosen.flatten().tolist()) - {self.count}):
            taken = choices.chosen == expert  # [M, k]
            rows = x * taken.any(-1, keepdim=True)
            inner = F.silu(self.gate_proj.of_group(rows, expert)) * self.up_proj.of_group(rows, expert)
            total += (choices.weights * taken).sum(-1, keepdim=True) * self.down_proj.of_group(inner, expert)
        return total.to(x.dtype)


class MicroBatch:
    """The tokens that a router counts and compares: those of a micro-batch, all of which are here.

    `parallel.cp` replaces it where ranks share sequences.
    """

    parts = 1
    """Number of ranks that have some of the tokens each, equally many."""

    def load(self, load: Tensor) -> Tensor:
        """Return the choices of each expert int64 `[E]` by all tokens; `load`: those by the tokens here."""
        return load

    def kept(self, chosen: Tensor, weights: Tensor, sequences: int, kind: MoE) -> Tensor | None:
        """Return `within_capacity` of the choices `[M, k]` of the tokens here, of so many sequences."""
        return within_capacity(chosen, weights, kind)


class MixtureOfExperts(nn.Module):
    """`sum_j w_j expert_j(x)` over the k chosen experts of each token, plus `shared(x)`.

    `step_loads` int64 `[E]` and `step_dropped` int64 `[]` add up the choices of a step's micro-batches, once each:
    `count` is called outside of blocks that recompute their forward pass.
    """

    auxiliary_losses: dict[str, Tensor]

    def __init__(self, kind: MoE, model: ModelConfig):
        super().__init__()
        self.kind = kind
        self.router: Router = (Router if kind.router.hidden_size is None else DeepRouter)(kind, model)
        self.experts = Experts(kind.experts, model.hidden_size, kind.inner(model))
        self.shared = DenseFeedForward(SwiGLU(), kind.shared(model)) if kind.shared_experts else None
        self.micro_batch = MicroBatch()
        self._counted: tuple[Tensor, Tensor] | None = None
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the counts of the step before."""
        self.step_loads: Tensor | None = None
        self.step_dropped: Tensor | None = None

    def count(self) -> None:
        """Add the last forward pass to the counts of the step."""
        if self._counted is not None:
            load, dropped = self._counted
            self.step_loads = load if self.step_loads is None else self.step_loads + load
            self.step_dropped = dropped if self.step_dropped is None else self.step_dropped + dropped
            self._counted = None

    def forward(self, x: Tensor, state: Tensor | None = None) -> Any:
        """Return `[B, T, D]` for `x` `[B, T, D]`; a router with a state takes and returns one, too, `[B, T, S]`."""
        logits, state = self._logits(x, state)
        return self._with_shared(x, self.experts(x, self._routed(logits, len(x))), state)

    def step(self, x: Tensor, state: Tensor | None = None) -> Any:
        """Return the same bits however tokens are split into calls, for generation."""
        logits, state = self._logits(x, state)
        y = self.experts.step(x.flatten(0, -2), self._choices(logits)[0]).view_as(x)
        return self._with_shared(x, y, state)

    def _with_shared(self, x: Tensor, y: Tensor, state: Tensor | None) -> Any:
        y = y if self.shared is None else y + self.shared(x)
        return y if state is None else (y, state)

    def _logits(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return logits `[M, E]` and the router's state `[B, T, S]`, None if it has none."""
        flat = x.flatten(0, -2)  # [M, D]
        if not isinstance(self.router, DeepRouter):
            return self.router(flat), None
        logits, state = self.router.with_state(flat, None if before is None else before.flatten(0, -2))
        return logits, state.view(*x.shape[:-1], -1)

    def _routed(self, logits: Tensor, sequences: int) -> Choices:
        """Return the choices by `logits` `[M, E]` of so many sequences; set losses and counts of the micro-batch."""
        kind = self.kind
        choices, scores = self._choices(logits, sequences)
        load = loads(choices.chosen, kind.experts)
        losses = {}
        if kind.balance_loss:
            losses[BALANCE] = balance_loss(scores, self.micro_batch.load(load), kind, self.micro_batch.parts)
        if kind.z_loss:
            losses[ROUTER_Z] = z_loss(logits, kind.z_loss)
        self.auxiliary_losses = losses
        kept = choices.kept
        dropped = load.new_zeros(()) if kept is None else (~kept & (choices.chosen < kind.experts)).sum()
        self._counted = load, dropped
        return choices

    def _choices(self, logits: Tensor, sequences: int = 1) -> tuple[Choices, Tensor]:
        kind = self.kind
        scores = scores_of(logits, kind.router)  # [M, E]
        chosen = choose(scores, kind.per_token, kind.router, self.router.biases)  # [M, k]
        weights = weights_of(scores, chosen, kind.router)  # [M, k]
        kept = self.micro_batch.kept(chosen, weights, sequences, kind)
        if kind.router.skip:
            taken = chosen < kind.experts
            kept = taken if kept is None else kept & taken
        return Choices(chosen, weights, kept), scores
