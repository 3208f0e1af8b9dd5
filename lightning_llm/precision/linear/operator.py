"""The quantised linear layer as one operator each way: what a compiler sees of it in a block's graph.

Its casts are kernels of `inductor`, compiled to round where the code rounds, which the graph around them is not. What
shapes a graph are tensors alone: a layer goes by its number, so that all blocks of a kind share one graph, and the call
finds the layer's plan, delayed scales and observer when it runs. Keys are given, since a micro-batch's backward pass
may come after another's forward pass; plans, scales and observers stay as they are between the two.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lightning_llm.precision.linear.autograd import Record, Wanted, backward, forward
from lightning_llm.precision.linear.call import LinearCall
from lightning_llm.precision.linear.shared_casts import shared


class Layer(Protocol):
    """A quantised linear layer, as its calls find it."""

    def call_now(self, keys: Tensor | None, device: torch.device, high: bool, observed: bool) -> LinearCall:
        """Return the call by `keys` that the layer makes now, its state on `device`; `high`: without casts."""
        ...

    @property
    def recorder(self) -> Record | None:
        """What is told the tensors of a call that delayed scales follow, None where there are none."""
        ...


_layers: WeakValueDictionary[int, Layer] = WeakValueDictionary()
_numbers = itertools.count()


def number(layer: Layer) -> Tensor:
    """Return a number for `layer`, by which `operator` knows it while it lives: int64 [], on the CPU, no constant."""
    own = next(_numbers)
    _layers[own] = layer
    return torch.tensor(own, device="cpu")


def operator(
    x: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor | None, layer: Tensor, high: bool, records: bool
) -> Tensor:
    """Return x W^T + b [..., N] for `x` [..., K], W [N, K] and b [N], as the `layer` of that number multiplies now.

    `keys`: int64 [KEY_COUNT] or None. `high`: without casts. `records`: delayed scales follow what this call sees.
    """
    y: Tensor = _forward(x, weight, bias, keys, layer, high, records)
    return y


# Amaxes and observers are told beside what is returned. Nothing of that is lost to a compiler that takes the operator
# for pure: the result is always used, and no two calls are alike, since each layer has its number.
@torch.library.custom_op("lightning_llm::quantised_linear", mutates_args=())
def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor | None, layer: Tensor, high: bool, records: bool
) -> Tensor:
    its = _layers[int(layer)]
    with _as_in_a_function():
        # A recomputation records the same amax again, which changes nothing; it is not to be observed again.
        call = its.call_now(keys, x.device, high, observed=not _in_backward())
        flat = x.detach().reshape(-1, x.shape[-1])  # [M, K]
        y = forward(call, flat, weight.detach(), bias, its.recorder if records else None)  # [M, N]
        return y.reshape(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("lightning_llm::quantised_linear_backward", mutates_args=())
def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor | None, layer: Tensor,
    high: bool, records: bool, needs_dx: bool, needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    its = _layers[int(layer)]
    with _as_in_a_function():
        call = its.call_now(keys, x.device, high, observed=True)
        wanted = Wanted(needs_dx, needs_dw, None if bias is None else bias.dtype)
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
    x: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor | None, layer: Tensor, high: bool, records: bool
) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, keys: Tensor | None, layer: Tensor,
    high: bool, records: bool, needs_dx: bool, needs_dw: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx, dw = x.new_empty(x.shape) if needs_dx else None, weight.new_empty(weight.shape) if needs_dw else None
    return _given((dx, dw, None if bias is None else bias.new_empty(bias.shape)), x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, keys, layer, ctx.high, ctx.records = inputs
    ctx.save_for_backward(x, weight, bias, keys, layer)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs_dx, needs_dw, needs_dbias = ctx.needs_input_grad[:3]
    dx, dw, dbias = _backward(dy, *ctx.saved_tensors, ctx.high, ctx.records, needs_dx, needs_dw)
    gradients = (dx if needs_dx else None, dw if needs_dw else None, dbias if needs_dbias else None)
    return *gradients, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)

OPERATOR = torch.ops.lightning_llm.quantised_linear.default
"""The operator in a graph: a matrix product with its casts."""


_DISPATCH = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def _as_in_a_function() -> Iterator[None]:
    """Run the block as an autograd function's own code runs, which casts have kernels for.

    An operator's runs below autograd, whose keys a kernel's guards would find missing and have another one compiled.
    """
    shared.forget()  # the graph around the operator writes to memory again, and no version says so
    try:
        with torch._C._ForceDispatchKeyGuard(*_DISPATCH), torch.no_grad():
            yield
    finally:
        shared.forget()


def _in_backward() -> bool:
    """Return whether a backward pass is running: what runs forward within it repeats an earlier forward pass."""
    return torch._C._current_graph_task_id() != -1
