"""Tokens to experts and back: rows sorted by expert, and the weighted sum of each token's outputs.

Rows of an expert are in the order of their tokens, as in torchtitan's `token_dispatcher.py`, so that they do not depend
on how a sort breaks ties. Sums are in the order of expert numbers, fp32, and rounded once.

Letters: M tokens, D hidden_size, E local experts, k experts per token, R rows of all experts.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_llm.linalg.grouped import Groups, has_values
from lightning_llm.model.experts.router import wide_dtype


class Placement(NamedTuple):
    """The row of each choice, int64 `[M, k]`; `groups.total` for a choice that no local expert takes.

    `spare`: 1 if there may be such choices, so that they need a row to be written to. `one_to_one`: each choice has
    a row, and each row a choice.
    """

    rows: Tensor
    groups: Groups
    spare: int
    one_to_one: bool


@torch.no_grad()
def place(
    chosen: Tensor, kept: Tensor | None, experts: int, first: int = 0, of: int | None = None, multiple: int = 1
) -> Placement:
    """Return the rows of the choices `[M, k]` that fall on local experts: `experts` of `of`, from number `first` on.

    `kept`: choices that are not dropped, None for all. Each expert's rows are filled up to a multiple of `multiple`.
    """
    flat = chosen.flatten() - first
    here = (flat >= 0) & (flat < experts)
    if kept is not None:
        here &= kept.flatten()
    key = torch.where(here, flat, experts)
    by_expert, order = key.sort(stable=True)
    starts = torch.searchsorted(by_expert, torch.arange(experts + 1, device=flat.device))  # [E + 1]
    sizes = -(-starts.diff() // multiple) * multiple  # [E]
    all_here = kept is None and experts == (of or experts)
    one_to_one = all_here and multiple == 1
    total = _total(sizes, len(flat), is_known=one_to_one)
    begins = torch.cat([sizes.cumsum(0) - sizes, sizes.new_zeros(1)])  # [E + 1]
    placed = begins[by_expert] + torch.arange(len(flat), device=flat.device) - starts[by_expert]
    rows = torch.empty_like(flat)
    rows[order] = torch.where(by_expert < experts, placed, total)
    return Placement(rows.view_as(chosen), Groups(sizes, total), int(not all_here), one_to_one)


def _total(sizes: Tensor, choices: int, *, is_known: bool) -> int:
    """Return the number of rows: known without waiting for the device if every choice has one and none is added."""
    if is_known or not has_values(sizes):
        return choices
    return int(sizes.sum())


class _Dispatch(torch.autograd.Function):
    """Rows `[R, D]` of tokens `[M, D]`; rows that fill up a group are zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, placement: Placement) -> Tensor:
        rows, groups, spare, one_to_one = placement
        ctx.save_for_backward(rows)
        ctx.spare = spare
        if one_to_one:
            return x.index_select(0, _choices(rows) // rows.shape[1])
        sent = x.new_zeros(groups.total + spare, x.shape[1])
        for slot in rows.unbind(1):
            sent[slot] = x
        return sent[: groups.total]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return _sum_of_rows(gradient, rows, None, ctx.spare), None


class _Combine(torch.autograd.Function):
    """The sums `[M, D]` of each token's rows times their weights `[M, k]`."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, placement: Placement) -> Tensor:
        ctx.save_for_backward(outputs, weights, placement.rows)
        ctx.spare, ctx.one_to_one = placement.spare, placement.one_to_one
        return _sum_of_rows(outputs, placement.rows, weights, placement.spare)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        outputs, weights, rows = ctx.saved_tensors
        wide = gradient.to(weights.dtype)
        if ctx.one_to_one and outputs.dtype == wide.dtype:  # the same products, without a copy of `outputs` per choice
            choices = _choices(rows)
            of_rows = wide.index_select(0, choices // rows.shape[1])  # [R, D]
            of_weights = (of_rows * outputs).sum(-1)[rows]
            return of_rows.mul_(weights.flatten()[choices, None]).to(outputs.dtype), of_weights, None
        of_outputs = outputs.new_zeros(len(outputs) + ctx.spare, outputs.shape[1])
        of_weights = torch.empty_like(weights)
        for index, slot in enumerate(rows.unbind(1)):
            of_outputs[slot] = (weights[:, index, None] * wide).to(outputs.dtype)
            of_weights[:, index] = (wide * _rows(outputs, slot, ctx.spare).to(wide.dtype)).sum(-1)
        return of_outputs[: len(outputs)], of_weights, None


def _choices(rows: Tensor) -> Tensor:
    """Return the choice in each row, int64 `[R]`, numbered row-major: the inverse of `rows` `[M, k]`."""
    choices = torch.empty_like(rows).flatten()
    choices[rows.flatten()] = torch.arange(len(choices), device=rows.device)
    return choices


def _sum_of_rows(values: Tensor, rows: Tensor, weights: Tensor | None, spare: int) -> Tensor:
    """Return `[M, D]` in the dtype of `values` `[R, D]`: the sums over k of rows, times `weights`, in fp32."""
    total = values.new_zeros(len(rows), values.shape[1], dtype=wide_dtype(values))
    for index, slot in enumerate(rows.unbind(1)):
        each = _rows(values, slot, spare).to(total.dtype)  # a copy
        total += each if weights is None else each.mul_(weights[:, index, None])
    return total.to(values.dtype)


def _rows(values: Tensor, slot: Tensor, spare: int) -> Tensor:
    """Return the rows numbered `slot` `[M]`, zeros for those past the last, which are there only with `spare`."""
    if not spare:
        return values.index_select(0, slot)  # on a CPU several times as fast as an index
    if not len(values):
        return values.new_zeros(len(slot), values.shape[1])
    found = values.index_select(0, slot.clamp(max=len(values) - 1))
    return found.masked_fill_((slot >= len(values))[:, None], 0)


def dispatch(x: Tensor, placement: Placement) -> Tensor:
    """Return the rows `[R, D]` of all local experts for tokens `x` `[M, D]`."""
    sent: Tensor = _Dispatch.apply(x, placement)
    return sent


def combine(outputs: Tensor, weights: Tensor, placement: Placement) -> Tensor:
    """Return `[M, D]` of the experts' `outputs` `[R, D]` and the choices' `weights` `[M, k]`."""
    y: Tensor = _Combine.apply(outputs, weights, placement)
    return y
