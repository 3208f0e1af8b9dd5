"""The quantised linear layer: one autograd function, three GEMMs, six casts (see `config.schema.precision`).

Every operand is quantised from the high-precision tensor along its own GEMM's contraction axis, in the layout it is
stored in. Nothing quantised is kept between forward and backward: casts are functions of (tensor, scale, key), so the
backward pass makes them again, which is cheaper than the memory. Those of a weight may be kept from one micro-batch to
the next (`weight_casts`). Random bits come from a tensor of keys, no counter.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_llm.config.schema.precision import SLOTS, CastConfig, HadamardConfig, PrecisionConfig
from lightning_llm.precision import inductor
from lightning_llm.precision.gemm import multiplied_in_fp32, multiply
from lightning_llm.precision.hadamard import fixed_signs, rotate, rotation
from lightning_llm.precision.inductor import Backend
from lightning_llm.precision.operand import Operand
from lightning_llm.precision.quantize import Origin, Scaled
from lightning_llm.precision.random_bits import random_signs
from lightning_llm.precision.shared_casts import shared
from lightning_llm.precision.weight_casts import WantedCast, WeightCasts

SLOT_NAMES = tuple(f"{gemm}.{operand}" for gemm, operand in SLOTS)
GEMM_NAMES = ("fprop", "dgrad", "wgrad")
KEY_COUNT = len(SLOT_NAMES) + len(GEMM_NAMES)  # one key per slot for rounding, one per GEMM for its rotation's signs
ROLES = ("x", "w", "dy")  # the three tensors, each with one delayed scale
Record = Callable[[str, Tensor], None]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class SeenCast(NamedTuple):
    """One cast as it ran: what `slot` was `given` [R, C], what was `rounded` after the rotation, and to what."""

    slot: str
    given: Tensor
    cast: CastConfig
    axis: int
    rounded: Tensor
    scaled: Scaled
    operand: Operand


Observe = Callable[[SeenCast], None]


class Shard(NamedTuple):
    """How a role's local tensor lies in the logical one: its origin, and the maximum over the ranks that share it.

    `counts`: false where another rank has the same part, and counts it for both.
    """

    origin: Origin = Origin()
    reduce_amax: Callable[[Tensor], Tensor] | None = None
    counts: bool = True


@dataclass(frozen=True)
class LinearPlan:
    """What a quantised linear does, beside its weights: six casts by slot name, a backend, the shards by role.

    `fixed`: the layer is here for its dtype only (fp16 on a CPU) and stays high in every phase of the recipe.
    `rule`: which rule of the recipe's `modules.casts` the layer follows, None where the recipe's own slots are its.
    `observe` is called with every cast, once, and must change nothing. `weight_casts`: None, where all are made here.
    """

    casts: Mapping[str, CastConfig]
    backend: Backend
    shards: Mapping[str, Shard] = field(default_factory=dict)
    fixed: bool = False
    observe: Observe | None = None
    rule: int | None = None
    weight_casts: WeightCasts | None = None

    @classmethod
    def of(cls, recipe: PrecisionConfig, backend: Backend, rule: int | None = None) -> "LinearPlan":
        """Return the plan of a layer that follows `rule` of `recipe`, or has its own slots."""
        return cls(recipe.casts_under(rule), backend, rule=rule)

    def with_weight_casts(self, source: WeightCasts) -> "LinearPlan":
        """Return the plan with casts of the weight from `source`."""
        return replace(self, weight_casts=source)

    def delayed_casts(self) -> dict[str, CastConfig]:
        """Return the casts that delayed scales are kept for, by role; the slots of one role share a scale."""
        named = ((slot.split(".")[1], cast) for slot, cast in self.casts.items())
        return {role: cast for role, cast in named if cast.scale == "delayed"}

    @property
    def random(self) -> bool:
        """Whether any cast draws random bits."""
        return any(c.stochastic or (c.hadamard and c.hadamard.signs == "random") for c in self.casts.values())


Given = Tensor | Callable[[], Tensor]
"""A tensor to cast, or what gives it when it is needed: a weight whose cast is kept is not."""


class LinearCall(NamedTuple):
    """One call's plan with its tensors that are neither activations nor weights."""

    plan: LinearPlan
    keys: Tensor | None  # int64 [KEY_COUNT]
    scales: Tensor | None  # fp32 [len(ROLES)], delayed scaling's multipliers
    rotations: dict[str, Tensor] | None = None  # by GEMM, of both of its operands, where they are to be kept

    @property
    def knows_amax(self) -> bool:
        """Whether the weight's amax need not be taken of the weight."""
        source = self.plan.weight_casts
        return source is not None and source.known_amax() is not None

    def signs(self, gemm: str, config: HadamardConfig, device: torch.device) -> Tensor | None:
        """Return the rotation's signs for `gemm`, the same for both of its operands."""
        if config.signs == "none":
            return None
        if config.vector is not None:  # signs are fixed
            return fixed_signs(config.vector, device)
        if self.keys is None:
            raise ValueError(f"random Hadamard signs of {gemm} need a key; none was set for this step")
        return random_signs(self.keys[len(SLOT_NAMES) + GEMM_NAMES.index(gemm)], config.size)

    def matrix(self, slot: str, device: torch.device) -> Tensor | None:
        """Return the rotation of `slot`, or None."""
        config, gemm = self.plan.casts[slot].hadamard, slot[:5]
        if config is None:
            return None
        kept = {} if self.rotations is None else self.rotations
        if gemm not in kept:
            kept[gemm] = rotation(config.size, self.signs(gemm, config, device), device)
        return kept[gemm]

    def operand(self, x: Given, slot: str, axis: int) -> Operand:
        """Return `x` [R, C] rotated and quantised for `slot` along the contraction `axis`, or what stands for it."""
        source, cast = self.plan.weight_casts, self.plan.casts[slot]
        if not callable(x) and self._is_shared(slot):
            made_by = inductor.cast_by(cast, axis, self.plan.backend)
            return shared.of(x.detach(), slot, (made_by, axis, cast.hadamard), lambda: self._made(x, slot, axis))
        if source is None or not slot.endswith(".w") or not cast.quantises:
            return self._made(x, slot, axis)
        weight = x if callable(x) else lambda: x
        make, observed = partial(self._made, weight, slot, axis), self.plan.observe is not None
        return source.operand(WantedCast(slot, self.plan.casts, observed, weight, make))

    def operands_of(self, dy: Tensor) -> Callable[[str, int], Operand]:
        """Return what gives `dy`'s operand for a slot and an axis: one where both GEMMs read the same codes."""
        casts = self.plan.casts
        cast = casts["dgrad.dy"]
        if not cast.quantises or cast != casts["wgrad.dy"] or cast.block != "tensor" or self.plan.observe is not None:
            return partial(self.operand, dy)
        if cast.stochastic or cast.hadamard is not None:
            return partial(self.operand, dy)
        both = functools.cache(lambda: self.operand(dy, "dgrad.dy", 1))
        return lambda slot, axis: both()

    def _is_shared(self, slot: str) -> bool:
        """Whether the operand of `slot` is that of all layers that read the same X, on this rank alone."""
        cast, plan = self.plan.casts[slot], self.plan
        if not slot.endswith(".x") or not cast.quantises or cast.stochastic or cast.scale == "delayed":
            return False
        if cast.source == "quantised" or (cast.hadamard is not None and cast.hadamard.signs == "random"):
            return False
        return plan.observe is None and plan.backend != "shapes" and plan.shards.get("x", Shard()).reduce_amax is None

    def _made(self, x: Given, slot: str, axis: int) -> Operand:
        x = x() if callable(x) else x
        cast, given = self.plan.casts[slot], x
        role = slot.split(".")[1]
        if cast.hadamard is not None:
            s = self.matrix(slot, x.device)
            x = x if s is None else rotate(x, s, axis, DTYPES[cast.hadamard.round_to])
        if not cast.quantises:
            return Operand(x)
        observe = self.plan.observe
        shard = self.plan.shards.get(role, Shard())
        return inductor.operand(
            x,
            cast,
            axis,
            self.plan.backend,
            key=None if self.keys is None or not cast.stochastic else self.keys[SLOT_NAMES.index(slot)],
            origin=shard.origin,
            delayed=None if self.scales is None else self.scales[ROLES.index(role)],
            wide=role != "w" and multiplied_in_fp32(given, cast),
            reduce_amax=shard.reduce_amax if cast.amax_scope == "logical" else None,
            observe=None if observe is None else partial(_tell, observe, slot, given, cast, axis),
        )

    def unobserved(self) -> "LinearCall":
        """Return the call without its observer: for casts that are made a second time."""
        return self if self.plan.observe is None else self._replace(plan=replace(self.plan, observe=None))


def _tell(observe: Observe, *seen: Any) -> None:
    observe(SeenCast(*seen))


@dataclass
class _Forward:
    """fprop's quantised operands, made again in the backward pass where a slot or a gradient needs them."""

    call: LinearCall
    dtype: torch.dtype
    tensors: Mapping[str, Callable[[], Tensor]]
    made: dict[str, Operand] = field(default_factory=dict)

    def operand(self, role: str) -> Operand:
        """Return fprop's operand of `role` (x or w)."""
        if role not in self.made:
            self.made[role] = self.call.operand(self.tensors[role], f"fprop.{role}", 1)
        return self.made[role]

    def source(self, slot: str, role: str) -> Tensor:
        """Return what `slot` quantises: the high-precision tensor, or its quantised form in the same dtype."""
        if self.call.plan.casts[slot].source == "high_precision":
            return self.tensors[role]()
        return self.operand(role).dequantised().to(self.dtype)

    def through(self, gradient: Tensor, role: str) -> Tensor:
        """Take a gradient with respect to fprop's quantised, rotated `role` back to the tensor: mask, then S^T."""
        cast = self.call.plan.casts[f"fprop.{role}"]
        inside = self.operand(role).inside if cast.clip_gradient else None
        if inside is not None:
            gradient = gradient * inside.to(gradient.dtype)
        s = self.call.matrix(f"fprop.{role}", gradient.device)
        return gradient if s is None else rotate(gradient, s.T, 1, gradient.dtype)


def _in_dtype(weight: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return what gives `weight` in `dtype`, in which it is quantised, and casts it once."""
    return functools.cache(lambda: weight.to(dtype))


def forward(call: LinearCall, x: Tensor, weight: Tensor, bias: Tensor | None, record: Record | None) -> Tensor:
    """Return Y [M, N] = X W^T + b in the dtype of X [M, K], by the first two of six casts. W [N, K], b [N] or None."""
    call, w = call._replace(rotations={}), _in_dtype(weight, x.dtype)
    if record is not None:
        record("x", x)
        record("w", weight if call.knows_amax else w())
    operands = call.operand(x, "fprop.x", 1), call.operand(w, "fprop.w", 1)
    return multiply(operands[0], operands[1].flipped, x.dtype, call.plan.backend, bias)


class Wanted(NamedTuple):
    """Which gradients a backward pass is to make: those of X and of W, and of b in which dtype, None for none."""

    dx: bool
    dw: bool
    dbias: torch.dtype | None


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def backward(
    call: LinearCall, dy: Tensor, x: Tensor, weight: Tensor, wanted: Wanted, record: Record | None
) -> Gradients:
    """Return the gradients of X, W and b, in their dtypes, from `dy` [M, N], by the other four of six casts."""
    call, plan = call._replace(rotations={}), call.plan
    dy = dy.to(x.dtype).contiguous()
    if record is not None:
        record("dy", dy)
    made = _Forward(call.unobserved(), x.dtype, {"x": lambda: x, "w": _in_dtype(weight, x.dtype)})
    dx = dw = dbias = None
    of_dy = call.operands_of(dy)
    if wanted.dx:
        w = partial(made.source, "dgrad.w", "w")
        dx = multiply(of_dy("dgrad.dy", 1), call.operand(w, "dgrad.w", 0), x.dtype, plan.backend)
        # A GEMM over fprop's quantised weight gives a gradient in the domain fprop rotated both operands into.
        if plan.casts["dgrad.w"].source == "quantised":
            dx = made.through(dx, "x")
    if wanted.dw:
        source = made.source("wgrad.x", "x")
        left, right = of_dy("wgrad.dy", 0).flipped, call.operand(source, "wgrad.x", 0)
        dw = multiply(left, right, x.dtype, plan.backend)
        if plan.casts["wgrad.x"].source == "quantised":
            dw = made.through(dw, "w")
        dw = dw.to(weight.dtype)
    if wanted.dbias is not None:
        dbias = dy.sum(0, dtype=torch.float32).to(wanted.dbias)
    return dx, dw, dbias


class _QuantisedLinear(torch.autograd.Function):
    """`forward` and `backward` of one call. X [M, K], W [N, K], b [N] or None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        keys: Tensor | None,
        scales: Tensor | None,
        plan: LinearPlan,
        record: Record | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, keys, scales)
        ctx.plan, ctx.record, ctx.bias_dtype = plan, record, None if bias is None else bias.dtype
        return forward(LinearCall(plan, keys, scales), x, weight, bias, record)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, keys, scales = ctx.saved_tensors
        wanted = Wanted(ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.bias_dtype)
        gradients = backward(LinearCall(ctx.plan, keys, scales), dy, x, weight, wanted, ctx.record)
        return *gradients, None, None, None, None


def quantised_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: LinearPlan,
    keys: Tensor | None = None,
    scales: Tensor | None = None,
    record: Record | None = None,
) -> Tensor:
    """Return x W^T + b, [..., N] in the dtype of `x` [..., K], through `plan`'s six casts, forward and backward.

    Operator by operator: in a compiled block `linear_operator` stands for it.

    `keys`: int64 [KEY_COUNT], needed where a cast is stochastic or a rotation's signs are random. `scales`: fp32
    [len(ROLES)], needed for delayed scaling; `record(role, tensor)` is told what its amax is taken from. Raises
    ValueError where one is missing or a block or rotation does not fit.
    """
    flat = x.reshape(-1, x.shape[-1])  # [M, K]
    y = _QuantisedLinear.apply(flat, weight, bias, keys, scales, plan, record)  # [M, N]
    return y.reshape(*x.shape[:-1], weight.shape[0])
