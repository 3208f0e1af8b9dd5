"""Operands of one call of a quantized linear layer, rotated and quantized or cached, and their GEMM (`multiply`).

On a CPU, where a cast takes time and the memory of one more operand does not matter, an activation that several layers
read (the input of q, k and v, and that of gate and up) is cast once (`SharedCasts`). A tensor is identified by its
memory and its version, which every operator of torch that writes to it increments. Compiled kernels reuse memory
without that, so nothing is kept from one operator of a compiled graph to the next (`forget`).

Codes, and codes times block scales, are exact in bf16, so a bf16 GEMM multiplies the numbers of the low-precision
hardware: exact inputs, fp32 accumulation, one cast at the end. Two kinds of scale follow: tensor-level factors multiply
the product, and fp32 block scales (times a code they fit no 16-bit format) multiply partial sums over one block each,
as block-scaled FP8 kernels do. On CUDA, factors multiply the fp32 sums, which 16-bit `mm` can return. On a CPU it
cannot, so a factor that is no power of two rounds a second time, by at most half a unit in the last place: the same on
every CPU, see `linalg.gemm`. Partial sums need fp32 output, so there the codes go through an fp32 GEMM on either.
"""

import functools
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_llm.config.schema.precision import CastConfig, HadamardConfig
from lightning_llm.linalg.gemm import fp32_product, linear, product, returns_fp32
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.cast.inductor import Backend, run_by
from lightning_llm.precision.cast.quantize import Operand, fixed_signs, rotate, rotation
from lightning_llm.precision.cast.random_bits import random_signs
from lightning_llm.precision.linear.plan import (
    DTYPES,
    GEMM_NAMES,
    ROLES,
    SLOT_NAMES,
    CastRecord,
    LinearPlan,
    Observe,
    Shard,
    WantedCast,
)

T = TypeVar("T")


class _Made(NamedTuple):
    """A result and its source: the identity and version of a storage, without keeping its memory alive."""

    storage: StorageWeakRef
    place: tuple[Any, ...]
    how: Hashable
    result: Any


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.shape, x.stride(), x.dtype, x._version


class SharedCasts:
    """Cache of the latest cast of each kind, reused if the next call casts the same tensor in the same way."""

    def __init__(self) -> None:
        self._latest: dict[str, _Made] = {}

    def of(self, x: Tensor, kind: str, how: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, or its cached result for `x`; `how` names everything else that the result depends on."""
        if x.device.type != "cpu" or x.is_inference() or type(x) is not Tensor:
            return make()
        latest, place, storage = self._latest.get(kind), _place(x), StorageWeakRef(x.untyped_storage())
        if latest is not None and (latest.storage, latest.place, latest.how) == (storage, place, how):
            result: T = latest.result
            return result
        self._latest.pop(kind, None)
        result = make()
        self._latest[kind] = _Made(storage, place, how, result)
        return result

    def forget(self) -> None:
        """Drop all cached results: they are no longer needed, or tensors may have changed."""
        self._latest.clear()


shared = SharedCasts()
Given = Tensor | Callable[[], Tensor]
"""A tensor to cast, or a function that returns it when needed: not for a weight with a cached cast."""


class LinearCall(NamedTuple):
    """Plan of one call of a quantized linear, with its random keys, delayed scales and rotation matrices."""

    plan: LinearPlan
    keys: Tensor | None  # int64 [KEY_COUNT]
    scales: Tensor | None  # fp32 [len(ROLES)], delayed scaling's multipliers
    rotations: dict[str, Tensor] | None = None  # by GEMM, of both of its operands, where they are to be kept

    @property
    def knows_amax(self) -> bool:
        """Whether the source of weight casts knows the weight's amax, so that the weight need not be read."""
        source = self.plan.weight_casts
        return source is not None and source.known_amax() is not None

    def signs(self, gemm: str, config: HadamardConfig, device: torch.device) -> Tensor | None:
        """Return the signs of the rotation of both operands of `gemm`, fp32 [size]; None if all are +1."""
        if config.signs == "none":
            return None
        if config.vector is not None:  # signs are fixed
            return fixed_signs(config.vector, device)
        if self.keys is None:
            raise ValueError(f"random Hadamard signs of {gemm} need a key; none was set for this step")
        return random_signs(self.keys[len(SLOT_NAMES) + GEMM_NAMES.index(gemm)], config.size)

    def matrix(self, slot: str, device: torch.device) -> Tensor | None:
        """Return the rotation matrix of `slot`, fp32 [size, size]; None without a rotation."""
        config, gemm = self.plan.casts[slot].hadamard, slot.partition(".")[0]
        if config is None:
            return None
        kept = {} if self.rotations is None else self.rotations
        if gemm not in kept:
            kept[gemm] = rotation(config.size, self.signs(gemm, config, device), device, config.transform)
        return kept[gemm]

    def operand(self, x: Given, slot: str, axis: int) -> Operand:
        """Return `x` [R, C] rotated and quantized for `slot` along the contraction `axis`, or a cached operand."""
        source, cast = self.plan.weight_casts, self.plan.casts[slot]
        if not callable(x) and self._is_shared(slot):
            made_by = inductor.cast_by(cast, axis, self.plan.backend)
            return shared.of(x.detach(), slot, (made_by, axis, cast.hadamard), lambda: self._made(x, slot, axis))
        if source is None or not slot.endswith(".w") or not cast.quantizes:
            return self._made(x, slot, axis)
        weight = x if callable(x) else lambda: x
        make, observed = partial(self._made, weight, slot, axis), self.plan.observe is not None
        return source.operand(WantedCast(slot, self.plan.casts, observed, weight, make))

    def operands_of(self, dy: Tensor) -> Callable[[str, int], Operand]:
        """Return a function (slot, axis) -> operand of `dy`.

        It casts once if both backward GEMMs read the same codes.
        """
        casts = self.plan.casts
        cast = casts["dgrad.dy"]
        if not cast.quantizes or cast != casts["wgrad.dy"] or cast.block != "tensor" or self.plan.observe is not None:
            return partial(self.operand, dy)
        if cast.stochastic or cast.hadamard is not None:
            return partial(self.operand, dy)
        both = functools.cache(lambda: self.operand(dy, "dgrad.dy", 1))
        return lambda slot, axis: both()

    def _is_shared(self, slot: str) -> bool:
        """Whether all layers that read the same X share the operand of `slot`, on this rank."""
        cast, plan = self.plan.casts[slot], self.plan
        if not slot.endswith(".x") or not cast.quantizes or cast.stochastic or cast.scale_kind.from_history:
            return False
        if cast.source == "quantised" or (cast.hadamard is not None and cast.hadamard.signs == "random"):
            return False
        return plan.observe is None and plan.backend != "shapes" and plan.shards.get("x", Shard()).reduce_amax is None

    def _made(self, x: Given, slot: str, axis: int) -> Operand:
        x = x() if callable(x) else x
        cast, given = self.plan.casts[slot], x
        role = slot.split(".")[1]
        shard = self.plan.shards.get(role, Shard())
        origin = shard.origin
        if cast.hadamard is not None:
            s = self.matrix(slot, x.device)
            to = DTYPES[cast.hadamard.round_to]
            x = x if s is None else rotate(x, s, axis, to, cast.hadamard.transform)
            if axis == 1:  # rows of the whole tensor are padded as well
                origin = origin._replace(row_stride=cast.hadamard.padded(origin.row_stride))
        if not cast.quantizes:
            return Operand(x)
        observe = self.plan.observe
        return inductor.operand(
            x,
            cast,
            axis,
            self.plan.backend,
            key=None if self.keys is None or not cast.stochastic else self.keys[SLOT_NAMES.index(slot)],
            origin=origin,
            delayed=None if self.scales is None else self.scales[ROLES.index(role)],
            wide=role != "w" and multiplied_in_fp32(given, cast),
            reduce_amax=shard.reduce_amax if cast.amax_scope == "logical" else None,
            observe=None if observe is None else partial(_tell, observe, slot, given, cast, axis),
        )

    def unobserved(self) -> "LinearCall":
        """Return the same call without its observer, for casts that are repeated."""
        return self if self.plan.observe is None else self._replace(plan=replace(self.plan, observe=None))


def _tell(observe: Observe, *seen: Any) -> None:
    observe(CastRecord(*seen))


def observe_casts(
    x: Tensor, weight: Tensor, y: Tensor, plan: LinearPlan, keys: Tensor | None, scales: Tensor | None
) -> None:
    """Repeat the casts of y = x W^T that another implementation made, and report them to `plan.observe`.

    `x` [M, K] is in the dtype that is quantized, `weight` [N, K] in the parameter's dtype, and a hook gives the
    gradient of `y` [..., N]. Nothing is multiplied, and no tensor or generator changes. Operands have source
    high_precision, as in all native runs.
    """
    call, needs_dx, needs_dw = LinearCall(plan, keys, scales), x.requires_grad, weight.requires_grad
    outputs, dtype = weight.shape[0], x.dtype  # and neither tensor, which a checkpointed block is to let go

    @torch.no_grad()
    def look(dy: Tensor) -> None:
        dy = dy.reshape(-1, outputs).to(dtype).contiguous()
        if needs_dx:
            call.operand(dy, "dgrad.dy", 1)
        if needs_dw:
            call.operand(dy, "wgrad.dy", 0)

    with torch.no_grad():
        w = weight.to(dtype)
        call.operand(x, "fprop.x", 1)
        call.operand(w, "fprop.w", 1)
        if not y.requires_grad:
            return
        if needs_dx:
            call.operand(w, "dgrad.w", 0)
        if needs_dw:
            call.operand(x, "wgrad.x", 0)
    y.register_hook(look)


def multiply(a: Operand, b: Operand, dtype: torch.dtype, backend: Backend, bias: Tensor | None = None) -> Tensor:
    """Return the product a b [m, n] in `dtype` of [m, k] and [k, n], with all scales applied, plus `bias` [n]."""
    left, right = a.tensor, b.tensor
    partial = a.blocks is not None or b.blocks is not None
    unrounded = dtype == torch.float32 and left.dtype == right.dtype and not _crawls(left.dtype, left.device)
    if partial or not (left.dtype == right.dtype == dtype or unrounded) or _crawls(dtype, left.device):
        left, right = left.float(), right.float()
    factor = b.factor if a.factor is None else a.factor if b.factor is None else a.factor * b.factor
    rounds = dtype == torch.float32 != left.dtype  # a GEMM in the operands' dtype would
    if factor is None and bias is not None and not partial and not rounds:
        return linear(left, right.t(), bias.to(left.dtype)).to(dtype)
    if partial:
        sums = _sum_of_partials(a, b, left, right)
    else:
        sums = fp32_product(left, right) if unrounded or _keeps_sums(factor, left) else product(left, right)
    if factor is not None:
        return _finish(backend)(sums, factor, bias, dtype)
    return (sums if bias is None else sums + bias.float()).to(dtype)


def _crawls(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a GEMM in `dtype` does: fp16 on a CPU is a format, some hundred times slower than fp32."""
    return dtype == torch.float16 and device.type == "cpu"


def multiplied_in_fp32(x: Tensor, cast: CastConfig) -> bool:
    """Return whether `multiply` reads the operand that `cast` makes of `x` in fp32, so it is best made in fp32."""
    return cast.scales_partial_sums or _crawls(x.dtype, x.device)


def _keeps_sums(factor: Tensor | None, left: Tensor) -> bool:
    """Return whether a `factor` is to multiply fp32 sums: where the device's kernels return them."""
    return factor is not None and returns_fp32(left.device)


def _sum_of_partials(a: Operand, b: Operand, left: Tensor, right: Tensor) -> Tensor:
    """Return the fp32 sum over blocks of k of (left right)_block times both block scales.

    acc = fma(partial * a's scale, b's scale, acc), in the order of the blocks: Transformer Engine's
    `blockwise_fp8_gemm_reference.py` and DeepSeek-V3's promotion every 128 (arXiv 2412.19437, section 3.3.2).
    """
    depth = left.shape[1]
    widths = [each.blocks.width for each in (a, b) if each.blocks is not None]
    starts = sorted({start for width in widths for start in range(0, depth, width)})
    total = left.new_zeros(left.shape[0], right.shape[1])
    partial = torch.empty_like(total)
    one = left.new_ones(1, 1)
    for start, end in pairwise([*starts, depth]):
        length = end - start
        torch.mm(left.narrow(1, start, length), right.narrow(0, start, length), out=partial)
        if a.blocks is not None:
            partial.mul_(a.blocks.at(start))
        total.addcmul_(partial, one if b.blocks is None else b.blocks.at(start))
    return total


def _scale_and_cast(product: Tensor, factor: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    scaled = product.float() * factor
    return (scaled if bias is None else scaled + bias.float()).to(dtype)


@functools.cache
def _finish(backend: Backend) -> Callable[[Tensor, Tensor, Tensor | None, torch.dtype], Tensor]:
    return run_by(backend, _scale_and_cast, "scale_and_cast")
