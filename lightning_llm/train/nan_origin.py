"""Find the origin of NaN or Inf in a failed step: run the step again and check every operand.

A step is a function of config, seed, weights and step number. A failed step has changed none of them, so repeating it
gives the same values. Normal training steps have no overhead.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_llm.data.corpus import Batch
from lightning_llm.linalg import local
from lightning_llm.linalg.grouped import GroupedLinear
from lightning_llm.parallel.layout import SEQUENCE_PART, Layout
from lightning_llm.train.step import TrainStep

TENSORS = ("operand fprop.x", "operand fprop.w", "product of fprop", "operand dgrad.dy (and wgrad.dy)")
SENDER = 4
"""Place of the argument `sender` of `GroupedLinear.forward`, if it is given."""
NOWHERE = torch.iinfo(torch.int64).max


class _Watch:
    """Keeps the first non-finite tensor, by micro-batch and then by order of execution.

    Ranks compare a key of: micro-batch (19 bits), order within it (22 bits: forward before backward, then pipeline
    stages in their order, then order of execution), layer and kind (22 bits).
    """

    def __init__(self, micro_batches: list[int], at_once: list[list[int]], stages: int):
        """`micro_batches`: global indices of this rank's. `at_once`: `Layout.micro_batches_at_once`."""
        self.micro_batches, self.at_once, self.stages = micro_batches, at_once, stages
        self.current = dict.fromkeys(range(stages), -1)
        self.seen: Counter[tuple[int, int, bool]] = Counter()
        self.first = NOWHERE

    def begin(self, stage: int, *_: Any) -> None:
        """Record the start of a micro-batch's forward pass on a stage; they come in order, interleaved with
        backward."""
        self.current[stage] += 1

    def look(self, stage: int, micro_batch: int, layer: int, kind: int, tensor: Tensor | None, index: int) -> None:
        """Check one tensor of global micro-batch `index`, made during this rank's micro-batch number `micro_batch`."""
        backward = kind == len(TENSORS) - 1
        self.seen[stage, micro_batch, backward] += 1
        if tensor is None or bool(torch.isfinite(local(tensor)).all()):
            return
        reached = self.stages - 1 - stage if backward else stage
        order = (backward << 21) | (reached << 13) | min(self.seen[stage, micro_batch, backward], (1 << 13) - 1)
        key = (index << 44) | (order << 22) | (layer * len(TENSORS) + kind)
        self.first = min(self.first, key)

    def after_forward(self, stage: int, layer: int, module: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Check the operands of a linear layer's GEMMs, in order of execution."""
        micro_batch = self.current[stage]
        index = self.micro_batches[micro_batch]
        if isinstance(module, GroupedLinear) and self.at_once[micro_batch]:  # rows are of the micro-batch of a sender
            sender = inputs[SENDER] if len(inputs) > SENDER else 0
            index = self.at_once[micro_batch][sender] % SEQUENCE_PART
        self.look(stage, micro_batch, layer, 0, inputs[0].detach(), index)
        self.look(stage, micro_batch, layer, 1, module.weight.detach(), index)
        self.look(stage, micro_batch, layer, 2, output.detach(), index)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.look(stage, micro_batch, layer, 3, gradient, index))


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return every linear layer by name, in module order, quantized or not."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | GroupedLinear)
        or (type(module).__name__ == "Linear" and hasattr(module, "weight"))
    }


def find_origin(step: TrainStep, batch: Batch) -> str:
    """Repeat a failed step on `batch`; return a sentence that names its first non-finite tensor. Collective.

    The sentence is the same on all ranks. Call it before the update. The gradients are those of the repetition.
    """
    model, layout, pipeline = step.parallel.model, step.parallel.layout, step.parallel.pipeline
    stages = {stage.stage_index: stage.decoder for stage in pipeline.stages} if pipeline else {0: model}
    own = [(stage, name, layer) for stage, model in stages.items() for name, layer in linear_layers(model).items()]
    names, before = _of_all_stages([name for _, name, _ in own], layout)
    count = len(batch.tokens)
    micro_batches, at_once = layout.micro_batches(count), layout.micro_batches_at_once(count)
    watch = _Watch(micro_batches, at_once, layout.degrees.pp * layout.config.virtual_stages)
    with _watched(stages, [(stage, layer) for stage, _, layer in own], before, watch):
        step.repeat(batch)
    first = torch.tensor(watch.first, device=batch.tokens.device)
    found = int(layout.reduce(first, dist.ReduceOp.MIN, "world").item())
    if found != NOWHERE:
        layer, kind = divmod(found & ((1 << 22) - 1), len(TENSORS))
        return f"It first appeared in {names[layer]}, {TENSORS[kind]}, of micro-batch {found >> 44} of the step."
    return _in_gradients(model, layout, batch.tokens.device)


def _of_all_stages(names: list[str], layout: Layout) -> tuple[list[str], int]:
    """Return (names of all pipeline ranks in order, number of names before this rank's)."""
    parts = layout.gather_over_stages(names)
    return [name for part in parts for name in part], sum(map(len, parts[: layout.coordinates.pp]))


def _in_gradients(model: nn.Module, layout: Layout, device: torch.device) -> str:
    """Return the first parameter with a non-finite gradient although every operand was finite."""
    named = list(model.named_parameters())
    names, before = _of_all_stages([name for name, _ in named], layout)
    bad = [i for i, (_, p) in enumerate(named) if p.grad is not None and not torch.isfinite(local(p.grad)).all()]
    first = torch.tensor(before + bad[0] if bad else len(names), device=device)
    index = int(layout.reduce(first, dist.ReduceOp.MIN, "world").item())
    if index < len(names):
        return f"Every operand of the linear layers was finite; it first appeared in the gradient of {names[index]}."
    return "Every operand of the linear layers and every gradient was finite: it appeared in the logits or in the loss."


@contextmanager
def _watched(
    stages: Mapping[int, nn.Module], layers: list[tuple[int, nn.Module]], before: int, watch: _Watch
) -> Iterator[None]:
    """Context in which `watch` checks forward and backward passes of `stages`; their `layers` count from `before`."""

    def hook(stage: int, index: int) -> Any:
        return lambda layer, inputs, output: watch.after_forward(stage, index, layer, inputs, output)

    handles = [layer.register_forward_hook(hook(stage, before + i)) for i, (stage, layer) in enumerate(layers)]
    handles += [model.register_forward_pre_hook(partial(watch.begin, stage)) for stage, model in stages.items()]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()
