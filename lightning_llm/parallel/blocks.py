"""Transformations of single blocks: activation checkpointing and torch.compile."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_llm.config.schema import ParallelConfig
from lightning_llm.linalg.gemm import PRODUCTS
from lightning_llm.precision.linear.autograd import OPERATOR
from lightning_llm.precision.linear.module import quantised_layers, recompute_contexts

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def checkpoint_blocks(blocks: Mapping[str, nn.Module], config: ParallelConfig) -> None:
    """Make the blocks chosen by `config` recompute their forward pass, in place (Chen et al. 2016, arXiv 1604.06174).

    Blocks are chosen by global index, so pipeline stages recompute the same blocks as a single rank. Parameter names do
    not change.

    "selective" keeps the outputs of matrix products and attention, which are the most expensive to recompute
    (Korthikanti et al. 2022, arXiv 2205.05198, keep less; torchtitan's selective "op" mode keeps every second product).
    """
    for name, block in blocks.items():
        mode = config.checkpointing_of(int(name.rpartition(".")[2]))
        if mode == "none":
            continue
        keeps = partial(create_selective_checkpoint_contexts, expensive_ops(block)) if mode == "selective" else None
        keys = recompute_contexts(block) if quantised_layers(block) else None
        block.forward = _recomputed(block.forward, in_graph=keeps, eagerly=_both_of(keeps, keys))


def _recomputed(forward: Callable[..., Any], in_graph: Contexts | None, eagerly: Contexts | None) -> Callable[..., Any]:
    """Return `forward` with recomputation, in the contexts `eagerly`, or `in_graph` when it is being compiled."""
    # The model draws no torch random numbers, so no generator state is carried into the recomputation. The keys of
    # stochastic rounding are: by the context in eager mode, as inputs of the graph when compiled.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    eager = options if eagerly is None else options | {"context_fn": eagerly}
    graph = options if in_graph is None else options | {"context_fn": in_graph}

    def recomputed(
        *arguments: Any, **named: Any
    ) -> Any:  # a function of ours: torch.compile skips a partial of torch's
        if torch.compiler.is_compiling():
            return checkpoint(forward, *arguments, **graph, **named)
        return checkpoint(forward, *arguments, **eager, **named)

    return recomputed


def _both_of(keeps: Contexts | None, keys: Contexts | None) -> Contexts | None:
    if keeps is None or keys is None:
        return keeps or keys

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        (keep, reuse), (first, again) = keeps(), keys()
        return _both(keep, first), _both(reuse, again)

    return contexts


def expensive_ops(block: nn.Module) -> list[Any]:
    """Return the operators of `block` whose outputs selective checkpointing keeps instead of recomputing.

    These are matrix products, and the operators that a module of the block lists in `kernel_ops`. The plan counts the
    bytes of the latter as `Part.kernel_outputs`.
    """
    aten = torch.ops.aten
    kernels = dict.fromkeys(op for part in block.children() for op in getattr(part, "kernel_ops", ()))
    products = [aten.mm.default, aten.addmm.default, aten.bmm.default, aten._grouped_mm.default]
    return [*products, *PRODUCTS, OPERATOR, *kernels]


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def compile_blocks(blocks: Mapping[str, nn.Module]) -> None:
    """Compile each block in place: equal blocks share one graph, so a deep model compiles as fast as a shallow one."""
    for block in blocks.values():
        block.compile()
