"""Where NaN or Inf first appeared in a step that failed: the step is run again, this time looking at every operand.

A step is a function of config, seed, weights and step number, and one that failed changed none of them, so running it
again gives the same values. Training itself pays nothing for this.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_llm.parallel.gradient_sync import local

PLACES = ("operand fprop.x", "operand fprop.w", "product of fprop", "operand dgrad.dy (and wgrad.dy)")
NOWHERE = torch.iinfo(torch.int64).max


class _Watch:
    """Keeps the first place, by micro-batch and then by order of execution, where a tensor is not finite.

    The key that is compared over ranks: micro-batch (19 bits), order within it (22 bits), layer and place (22 bits).
    """

    def __init__(self, micro_batches: list[int]):
        self.micro_batches = micro_batches
        self.turn, self.order, self.first = -1, 0, NOWHERE

    def begin(self, *_: Any) -> None:
        """Note that a micro-batch's forward pass starts."""
        self.turn, self.order = self.turn + 1, 0

    def look(self, layer: int, place: int, tensor: Tensor | None) -> None:
        """Look at one tensor."""
        self.order += 1
        if tensor is None or bool(torch.isfinite(local(tensor)).all()):
            return
        key = (self.micro_batches[self.turn] << 44) | (self.order << 22) | (layer * len(PLACES) + place)
        self.first = min(self.first, key)

    def after_forward(self, layer: int, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Look at what a linear layer's GEMMs take, in the order in which they run."""
        self.look(layer, 0, inputs[0].detach())
        self.look(layer, 1, module.weight.detach())
        self.look(layer, 2, output.detach())
        if output.requires_grad:
            output.register_hook(lambda gradient: self.look(layer, 3, gradient))


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return every linear layer by name, in module order, whatever runs it."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or (type(module).__name__ == "Linear" and hasattr(module, "weight"))
    }


def find_origin(module: Any, strategy: Any, batch: Any) -> str:
    """Return a sentence on where the step of `batch` first was not finite, the same on all ranks. Collective.

    Called after the step has failed, before its update; gradients are those of the repetition afterwards.
    """
    layers = linear_layers(module.model)
    micro_batches = strategy.layout.micro_batches(batch.tokens.shape[0])
    watch = _Watch(micro_batches)
    with _watched(module.model, layers, watch), torch.compiler.set_stance("force_eager"):
        strategy.run_again(batch)
    device = strategy.root_device
    first = int(strategy.layout.reduce(torch.tensor(watch.first, device=device), dist.ReduceOp.MIN).item())
    if first != NOWHERE:
        layer, place = divmod(first & ((1 << 22) - 1), len(PLACES))
        name = list(layers)[layer]
        return f"It first appeared in {name}, {PLACES[place]}, of micro-batch {first >> 44} of the step."
    return _in_gradients(module, strategy)


def _in_gradients(module: Any, strategy: Any) -> str:
    """Return the first parameter whose gradient is not finite though every operand was."""
    named = list(module.model.named_parameters())
    bad = [i for i, (_, p) in enumerate(named) if p.grad is not None and not torch.isfinite(local(p.grad)).all()]
    first = torch.tensor(bad[0] if bad else len(named), device=strategy.root_device)
    index = int(strategy.layout.reduce(first, dist.ReduceOp.MIN).item())
    if index < len(named):
        return f"Every operand of the linear layers was finite; it first appeared in the gradient of {named[index][0]}."
    return "Every operand of the linear layers and every gradient was finite: it appeared in the logits or in the loss."


@contextmanager
def _watched(model: nn.Module, layers: dict[str, nn.Module], watch: _Watch) -> Iterator[None]:
    def hook(index: int) -> Any:
        return lambda layer, inputs, output: watch.after_forward(index, layer, inputs, output)

    handles = [layer.register_forward_hook(hook(index)) for index, layer in enumerate(layers.values())]
    handles.append(model.register_forward_pre_hook(watch.begin))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
