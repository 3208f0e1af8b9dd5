"""The quantized linear layer: one autograd function, three GEMMs, six casts (see `config.schema.precision`).

Every operand is quantized from the high-precision tensor along its own GEMM's contraction axis, in the layout it is
stored in. Nothing quantized is kept between forward and backward: casts are functions of (tensor, scale, key), so the
backward pass makes them again, which is cheaper than the memory. Those of a weight may be kept from one micro-batch to
the next (`plan.KeptCasts`). Random bits come from a tensor of keys, no counter.

A compiler sees one operator each way in a block's graph (`operator`): its casts are kernels of `inductor`, compiled to
round where the code rounds, which the graph around them is not. What shapes a graph are tensors alone: a layer goes by
its number, so that all blocks of a kind share one graph, and the call finds the layer's plan, delayed scales and
observer when it runs. Keys are given, since a micro-batch's backward pass may come after another's forward pass; plans,
scales and observers stay as they are between the two.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_llm.precision.cast.quantize import Operand, rotate
from lightning_llm.precision.linear.operands import LinearCall, multiply, shared
from lightning_llm.precision.linear.plan import LinearPlan

Record = Callable[[str, Tensor], None]


@dataclass
class _Forward:
    """fprop's quantized operands, made again in the backward pass where a slot or a gradient needs them."""

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
        """Return the input of `slot`: the high-precision tensor, or its quantized form in the same dtype."""
        if self.call.plan.casts[slot].source == "high_precision":
            return self.tensors[role]()
        return self.operand(role).dequantized().to(self.dtype)

    def through(self, gradient: Tensor, role: str, other: str) -> Tensor:
        """Take a gradient with respect to fprop's operand of `role` back through its cast: times the rule's factor.

        `other`: the other operand of the GEMM that gave it. If that is fprop's quantized operand, the gradient is in
        the domain that fprop rotated both into, and S^T follows; columns that only pad its last group are dropped.
        """
        cast = self.call.plan.casts[f"fprop.{role}"]
        inside = None if cast.gradient_kind.is_one else self.operand(role).inside
        if inside is not None:
            gradient = gradient * inside.to(gradient.dtype)
        if self.call.plan.casts[other].source != "quantised" or cast.hadamard is None:
            return gradient
        s = self.call.matrix(f"fprop.{role}", gradient.device)
        if s is None:
            return gradient
        turned = rotate(gradient, s.T, 1, gradient.dtype, cast.hadamard.transform)
        return turned[:, : self.tensors[role]().shape[1]]


def _in_dtype(weight: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return a function that returns `weight` in `dtype`, in which it is quantized, and casts it only once."""
    return functools.cache(lambda: weight.to(dtype))


def forward(call: LinearCall, x: Tensor, weight: Tensor, bias: Tensor | None, record: Record | None) -> Tensor:
    """Return Y [M, N] = X W^T + b in the dtype of X [M, K], with X and W cast by the slots fprop.x and fprop.w.

    `weight`: W [N, K]. `bias`: b [N] or None. `record`: see `quantized_linear`.
    """
    call, w = call._replace(rotations={}), _in_dtype(weight, x.dtype)
    if record is not None:
        record("x", x)
        record("w", weight if call.knows_amax else w())
    operands = call.operand(x, "fprop.x", 1), call.operand(w, "fprop.w", 1)
    return multiply(operands[0], operands[1].flipped, x.dtype, call.plan.backend, bias)


class NeededGradients(NamedTuple):
    """Gradients that a backward pass must compute: of X, of W, and of b (its dtype, or None if not needed)."""

    dx: bool
    dw: bool
    dbias: torch.dtype | None


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def backward(
    call: LinearCall, dy: Tensor, x: Tensor, weight: Tensor, wanted: NeededGradients, record: Record | None
) -> Gradients:
    """Return the gradients of X, W and b, in their dtypes, from `dy` [M, N], by the four casts of dgrad and wgrad."""
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
        dx = made.through(dx, "x", "dgrad.w")
    if wanted.dw:
        source = made.source("wgrad.x", "x")
        left, right = of_dy("wgrad.dy", 0).flipped, call.operand(source, "wgrad.x", 0)
        dw = multiply(left, right, plan.wgrad_dtype or x.dtype, plan.backend)
        dw = made.through(dw, "w", "wgrad.x").to(weight.dtype)
    if wanted.dbias is not None:
        dbias = dy.sum(0, dtype=torch.float32).to(wanted.dbias)
    return dx, dw, dbias


class _QuantizedLinear(torch.autograd.Function):
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
        on_backward: Callable[[], None] | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, keys, scales)
        ctx.plan, ctx.record, ctx.bias_dtype = plan, record, None if bias is None else bias.dtype
        ctx.on_backward = on_backward
        return forward(LinearCall(plan, keys, scales), x, weight, bias, record)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, keys, scales = ctx.saved_tensors
        if ctx.on_backward is not None:
            ctx.on_backward()
        wanted = NeededGradients(ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.bias_dtype)
        with without_autocast(dy.device.type):
            gradients = backward(LinearCall(ctx.plan, keys, scales), dy, x, weight, wanted, ctx.record)
        return *gradients, None, None, None, None, None


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    plan: LinearPlan,
    keys: Tensor | None = None,
    scales: Tensor | None = None,
    record: Record | None = None,
    on_backward: Callable[[], None] | None = None,
) -> Tensor:
    """Return x W^T + b, [..., N] in the dtype of `x` [..., K], through `plan`'s six casts, forward and backward.

    Runs operator by operator; compiled blocks use `operator` instead.

    `keys`: int64 [KEY_COUNT], needed if a cast is stochastic or a rotation's signs are random. `scales`: fp32
    [len(ROLES)], needed for delayed scaling; `record(role, tensor)` receives the tensors that amaxes are taken of;
    `on_backward` is called at the start of the backward pass. Raises ValueError if keys or scales are missing or a
    block or rotation does not fit.
    """
    flat = x.reshape(-1, x.shape[-1])  # [M, K]
    y = _QuantizedLinear.apply(flat, weight, bias, keys, scales, plan, record, on_backward)  # [M, N]
    return y.reshape(*x.shape[:-1], weight.shape[0])


class Layer(Protocol):
    """Interface of a quantized linear layer that `operator` reads."""

    def call_now(self, keys: Tensor | None, device: torch.device, unquantized: bool, observed: bool) -> LinearCall:
        """Return the layer's current plan with `keys` and its state on `device`; `unquantized`: without casts."""
        ...

    @property
    def recorder(self) -> Record | None:
        """Function (role, tensor) that records amaxes for delayed scales; None without such scales."""
        ...

    @property
    def clock(self) -> Any:
        """Object with the method `backward_runs()`, called in each backward pass; None if no clock counts them."""
        ...


_layers: WeakValueDictionary[int, Layer] = WeakValueDictionary()
_numbers = itertools.count()


def number(layer: Layer) -> Tensor:
    """Return the number by which `operator` finds `layer` while the layer exists: an int64 scalar on the CPU."""
    own = next(_numbers)
    _layers[own] = layer
    return torch.tensor(own, device="cpu")


def operator(
    x: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor | None, layer: Tensor, unquantized: bool, records: bool
) -> Tensor:
    """Custom operator for compiled blocks: return x W^T + b [..., N] with the current casts of a layer.

    `x` [..., K], `weight` W [N, K], `bias` b [N]. `layer`: the layer's `number`. `keys`: int64 [KEY_COUNT] or None.
    `unquantized`: without casts. `records`: record amaxes for delayed scales.
    """
    y: Tensor = _forward(x, weight, bias, keys, layer, unquantized, records)
    return y


# Reports to amaxes and observers are side effects. A compiler that assumes a pure operator does not lose them: the
# result is always used, and no two calls are equal, because each layer has a number.
@torch.library.custom_op("lightning_llm::quantized_linear", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor | None, layer: Tensor, unquantized: bool, records: bool
) -> Tensor:
    its = _layers[int(layer)]
    with _as_in_a_function():
        # A recomputation records the same amax again, which changes nothing; it is not to be observed again.
        call = its.call_now(keys, x.device, unquantized, observed=not in_backward())
        flat = x.detach().reshape(-1, x.shape[-1])  # [M, K]
        y = forward(call, flat, weight.detach(), bias, its.recorder if records else None)  # [M, N]
        return y.reshape(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("lightning_llm::quantized_linear_backward", mutates_args=())
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor | None, layer: Tensor,
    unquantized: bool, records: bool, needs_dx: bool, needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    its = _layers[int(layer)]
    if its.clock is not None:
        its.clock.backward_runs()
    with _as_in_a_function():
        call = its.call_now(keys, x.device, unquantized, observed=True)
        wanted = NeededGradients(needs_dx, needs_dw, None if bias is None else bias.dtype)
        rows, flat = dy.reshape(-1, dy.shape[-1]), x.detach().reshape(-1, x.shape[-1])  # [M, N], [M, K]
        record = its.recorder if records else None
        dx, dw, dbias = backward(call, rows, flat, weight.detach(), wanted, record)
        made = (None if dx is None else dx.reshape(x.shape), dw, dbias)
    return _given(made, x)


def _given(made: tuple[Tensor | None, ...], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients; empty tensors are those that are not wanted."""
    dx, dw, dbias = (x.new_empty(0) if each is None else each.contiguous() for each in made)
    return dx, dw, dbias


@_forward.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor | None, layer: Tensor, unquantized: bool, records: bool
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor | None, layer: Tensor,
    unquantized: bool, records: bool, needs_dx: bool, needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dw = x.new_empty(x.shape) if needs_dx else None, weight.new_empty(weight.shape) if needs_dw else None
    return _given((dx, dw, None if bias is None else bias.new_empty(bias.shape)), x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, keys, layer, ctx.unquantized, ctx.records = inputs
    ctx.save_for_backward(x, weight, bias, keys, layer)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs_dx, needs_dw, needs_dbias = ctx.needs_input_grad[:3]
    dx, dw, dbias = _backward(dy, *ctx.saved_tensors, ctx.unquantized, ctx.records, needs_dx, needs_dw)
    gradients = (dx if needs_dx else None, dw if needs_dw else None, dbias if needs_dbias else None)
    return *gradients, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
OPERATOR = torch.ops.lightning_llm.quantized_linear.default
"""The operator in a graph: a matrix product with its casts."""
_DISPATCH = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def _as_in_a_function() -> Iterator[None]:
    """Run the block like the code of an autograd function, for which casts have kernels.

    An operator runs below autograd: without its dispatch keys a kernel's guards would fail and another be compiled.
    """
    shared.forget()  # the graph around the operator reuses memory without changing versions
    try:
        with torch._C._ForceDispatchKeyGuard(*_DISPATCH), torch.no_grad():
            yield
    finally:
        shared.forget()


@contextmanager
def without_autocast(device_type: str) -> Iterator[None]:
    """Run the block without autocast, which would round its fp32 sums and scales."""
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    with torch.autocast(device_type, enabled=False):
        yield


def in_backward() -> bool:
    """Return whether a backward pass is running. A forward pass within it is a recomputation."""
    return torch._C._current_graph_task_id() != -1
