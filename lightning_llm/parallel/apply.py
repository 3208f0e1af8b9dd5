"""Parallelize a model: the single place that fixes the order of all transformations of a bare model.

Activation checkpointing and torch.compile of single blocks are here, the other transformations in other modules.
Every rank initializes only its own shards, from the meta device to memory, so no rank ever holds a whole copy
(`materialise`).
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_llm.config.schema import ParallelConfig, PrecisionConfig
from lightning_llm.linalg import DTYPES
from lightning_llm.linalg.gemm import PRODUCTS
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.init import CHUNK_ELEMENTS, parameter_slice
from lightning_llm.parallel.axis import axes_on_ranks
from lightning_llm.parallel.dp_shard import gather_codes, shard_decoder
from lightning_llm.parallel.gradient_sync import GradientSync
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.operand_shards import place_shards
from lightning_llm.parallel.pp import split_stages
from lightning_llm.parallel.torch_private import shard_offset
from lightning_llm.precision.linear.autograd import OPERATOR
from lightning_llm.precision.linear.module import quantized_layers, recompute_contexts

InitialSlice = Callable[[str, int, int], torch.Tensor]
"""(parameter name, start, stop) -> elements `start` to `stop` of the whole tensor, row-major, fp32, CPU."""
Fill = Callable[[Decoder, int, torch.device, InitialSlice | None], None]
"""Signature of `materialise`; a dry run passes another function."""
ELEMENTS_AT_ONCE = 64 * CHUNK_ELEMENTS


@torch.no_grad()
def materialise(model: Decoder, seed: int, device: torch.device, initial: InitialSlice | None = None) -> None:
    """Allocate `model`, built on the meta device, on `device` and set the initial values of this rank's shards.

    The values of a parameter are drawn from (`seed`, its name), or read from `initial`. They do not depend on the
    layout.
    """
    initial = initial or partial(parameter_slice, model.config, seed)
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        origin, target = _shard(parameter) if isinstance(parameter, DTensor) else ((0, 0), parameter)
        width = parameter.shape[1:].numel()  # of a row of the whole; a cut one has fewer elements
        for rows in target.split(max(1, ELEMENTS_AT_ONCE // width)):
            start = origin[0] * width
            values = initial(name, start, start + len(rows) * width)
            columns = slice(origin[1], origin[1] + rows.shape[1]) if rows.ndim > 1 else 0
            rows.copy_(values.view(len(rows), width)[:, columns])
            origin = (origin[0] + len(rows), origin[1])


def _shard(parameter: DTensor) -> tuple[tuple[int, int], torch.Tensor]:
    """Return the first row and column, in the whole tensor, of this rank's shard, and the shard."""
    offset = shard_offset(parameter)
    return (offset[0], offset[1] if len(offset) > 1 else 0), parameter.to_local()


def apply_parallel(
    model: Decoder,
    layout: Layout,
    precision: PrecisionConfig,
    seed: int,
    sequence_length: int,
    device: torch.device,
    initial: InitialSlice | None = None,
    fill: Fill = materialise,
) -> list[GradientSync]:
    """Parallelize `model`, built on the meta device with its linears swapped, and place it on this rank's `device`.

    `sequence_length`: tokens of a whole training sequence. `initial`: source of the initial weights; None draws them
    from `seed`. `fill` places an initialized stage on the device. Returns one `GradientSync` per pipeline stage of this
    rank, one in total without a pipeline. With a pipeline, `model` keeps only this rank's part.
    """
    model.to(DTYPES[precision.master_dtype])
    if (codes := precision.gradient_reduction) is not None:
        layout = replace(layout, gradient_cast=codes.cast)
    syncs = []
    for stage in split_stages(model, layout):
        for axis in axes_on_ranks(layout):
            axis.cut(stage)
        place_shards(stage, layout, sequence_length, device)
        recompute_and_compile(stage.blocks, layout.config)
        scatters = []
        if layout.shards:
            gathered, reduce = DTYPES[precision.gather_dtype], DTYPES[precision.reduce_dtype]
            scatters = shard_decoder(stage, layout, gathered, reduce)
        fill(stage, seed, device, initial)
        if layout.shards and precision.parameter_gather == "quantised":
            gather_codes(stage, layout, DTYPES[precision.compute_dtype])
        syncs.append(GradientSync(stage, layout, scatters))
    return syncs


def recompute_and_compile(blocks: Mapping[str, nn.Module], config: ParallelConfig) -> None:
    """Make blocks recompute their forward pass and compile them, in place, as `config` says.

    A recomputation is within a block's graph, so that it is compiled too. Torch cannot break a graph within a
    recomputation: blocks that break theirs recompute compiled functions instead.
    """
    broken = {name: block for name, block in blocks.items() if _eager_modules(block)}
    if config.compile:
        compile_blocks(broken)
    checkpoint_blocks(blocks, config)
    if config.compile:
        compile_blocks({name: block for name, block in blocks.items() if name not in broken})


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
        keys = recompute_contexts(block) if quantized_layers(block) else None
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
    """Compile each block in place: equal blocks share one graph, so a deep model compiles as fast as a shallow one.

    A block with modules that break the graph (`breaks_graph`) is compiled around them.
    """
    for block in blocks.values():
        eager = _eager_modules(block)
        for module in eager:
            module.__class__ = _uncompiled(type(module))  # type: ignore[arg-type]
        if eager:
            block.forward = torch.compile(block.forward)
        else:
            block.compile()


def _eager_modules(block: nn.Module) -> list[nn.Module]:
    return [module for module in block.modules() if getattr(module, "breaks_graph", False)]


@functools.cache
def _uncompiled(kind: type[nn.Module]) -> type[nn.Module]:
    """Return `kind` with a forward pass that is not compiled: one function for all its modules, which share graphs."""
    return type(kind.__name__, (kind,), {"forward": torch.compiler.disable(kind.forward)})
