"""Forward and backward passes of a quantized model over fixed batches, with chosen slots and layers quantized.

A slot is one operand of one matrix product of a linear layer, such as `fprop.x`. Weights are never updated.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.config.schema import PrecisionConfig
from lightning_llm.precision.linear.delayed import load_delayed_state, update_delayed
from lightning_llm.precision.linear.grouped import QuantizedGroupedLinear
from lightning_llm.precision.linear.module import (
    QuantizedLinear,
    high_precision_forward,
    quantized_layers,
    set_recipe,
    set_step_key,
)
from lightning_llm.precision.linear.plan import ROLES, SLOT_NAMES


@dataclass(frozen=True)
class Pass:
    """Result of one forward and backward pass over all batches: mean `loss`, and `gradients`, {parameter: fp32}."""

    loss: float
    gradients: dict[str, Tensor]


@dataclass
class LayerTensors:
    """Unquantized GEMM operands of a layer in the first batch: `x` [M, K], `dy` [M, N].

    `x_amax`, `dy_amax`: largest magnitudes over all batches.
    """

    x: Tensor | None = None
    dy: Tensor | None = None
    x_amax: float = 0.0
    dy_amax: float = 0.0


class Passes(ABC):
    """Base class of a `model` with quantized layers and its `batches`; each method that returns a `Pass` runs one pass.

    Attributes:
        layers: {name: layer} of the layers that the recipe quantizes.
        weight_names: {name of a layer: name of its weight among the gradients of a `Pass`}, for an expert that of its
            part of the weight that all experts of a linear share.
        tensors: {name of a layer: its operands in the unquantized pass}, set by `high`.
    """

    def __init__(self, model: nn.Module, recipe: PrecisionConfig, num_layers: int, batches: Sequence[Any], seed: int):
        """`num_layers`: blocks of the model, for the recipe's rules on first and last blocks."""
        self.model, self.recipe, self.batches, self.seed = model, recipe, batches, seed
        self._num_layers = num_layers
        set_recipe(model, recipe, num_layers)  # its own casts, also where a phase covers the first step
        floating = [each for each in model.parameters() if each.is_floating_point()]
        for parameter in floating:
            parameter.requires_grad_(True)
        self.device = floating[0].device
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._stacks: dict[str, list[str]] = {}
        """{name of a weight of all experts: names of its parts, in order}."""
        self._of_experts: dict[str, tuple[nn.Parameter, int]] = {}
        """{name of an expert's layer: (weight of all experts, the expert's number)}."""
        for module in model.modules():
            if isinstance(module, QuantizedGroupedLinear):
                own = [expert.place for expert in module.experts]  # the name that rules see
                self._stacks[names[id(module.weight)]] = [f"{name}.weight" for name in own]
                self._of_experts |= {name: (module.weight, number) for number, name in enumerate(own)}
        every = (layer for layer in quantized_layers(model) if not layer.plan.fixed)
        self.layers = {layer.place if layer.place in self._of_experts else layer.name: layer for layer in every}
        self._names = {id(layer): name for name, layer in self.layers.items()}
        self.weight_names = {
            name: f"{name}.weight" if name in self._of_experts else names[id(layer.weight)]
            for name, layer in self.layers.items()
        }
        self.loss_scale = 1.0
        self.tensors: dict[str, LayerTensors] = {}

    def matrix(self, name: str) -> Tensor:
        """Return the weight [N, K] of layer `name`, without a gradient."""
        if name not in self._of_experts:
            return self.layers[name].matrix.detach()
        weight, number = self._of_experts[name]
        rows = self.layers[name].out_features
        return weight.detach().narrow(0, number * rows, rows)

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """Return the contribution of a batch to the mean loss over all batches."""

    @abstractmethod
    def in_fp32(self) -> AbstractContextManager[None]:
        """Context in which the whole model computes in fp32."""

    @property
    def compute_dtype(self) -> str:
        """Name of the dtype of an unquantized pass, such as "bf16", for reports."""
        return self.recipe.compute_dtype

    @property
    def quantized_slots(self) -> list[str]:
        """Names of the slots that are quantized in at least one layer."""
        sets = [self.recipe.casts_under(layer.plan.rule) for layer in self.layers.values()]
        return [slot for slot in SLOT_NAMES if any(casts[slot].quantizes for casts in sets)]

    @property
    def random(self) -> bool:
        """Whether any cast draws random bits, so that a pass depends on its key."""
        return any(layer.plan.random for layer in self.layers.values())

    def reference(self) -> Pass:
        """Run and return the pass in which everything is computed in fp32."""
        with self.in_fp32(), high_precision_forward(self.model):
            return self._run(0)

    def high(self) -> Pass:
        """Run and return the pass in the recipe's compute dtype without any cast; store each layer's `tensors`.

        With loss scaling, this sets the largest scale at which the gradients are finite, for later passes, too.
        """
        if self.recipe.loss_scaling is not None:
            self.loss_scale = self.recipe.loss_scaling.init_scale
        with high_precision_forward(self.model):
            while True:
                self.tensors = {name: LayerTensors() for name in self.layers}
                with self._capturing():
                    made = self._run(0)
                finite = all(bool(torch.isfinite(gradient).all()) for gradient in made.gradients.values())
                if finite or self.loss_scale <= 1:
                    return made
                self.loss_scale /= 2

    def calibrate(self, state: Mapping[str, Mapping[str, Tensor]] | None) -> None:
        """Set delayed scales: those of the checkpoint in `state`, or else from the amaxes of the unquantized pass.

        `state`: {layer: {"scale", "amax_history"}}; None or a layer that is missing: from the amaxes.
        """
        delayed = [layer for layer in self.layers.values() if layer.plan.delayed_casts()]
        if not delayed:
            return
        known = {name: dict(its) for name, its in (state or {}).items()}
        missing = set(load_delayed_state(self.model, known))
        kept = [(layer, layer.scale, layer.amax_history) for layer in delayed if layer.name not in missing]
        for layer in delayed:
            name = self._names[id(layer)]
            seen, largest = self.tensors[name], float(self.matrix(name).abs().amax())
            amaxes = {"x": seen.x_amax, "w": largest, "dy": seen.dy_amax}
            length = layer.delayed_config().history_length
            layer.scale = torch.ones(len(ROLES), device=self.device)
            layer.amax_history = torch.zeros(length, len(ROLES), device=self.device)
            layer.amax_history[0] = torch.tensor([amaxes[role] for role in ROLES])
        update_delayed(self.model)
        for layer, scale, history in kept:
            layer.scale, layer.amax_history = scale, history

    def quantized(self, key: int, recipe: PrecisionConfig | None = None, kept: frozenset[str] = frozenset()) -> Pass:
        """Run and return the pass with the casts of `recipe` in every layer except the unquantized ones, `kept`.

        `key`: number of the draw of random bits; `recipe`: None for the probed one, else a recipe with as many rules in
        `modules.casts`.
        """
        with self._casting(recipe or self.recipe, kept):
            return self._run(key)

    def keys_for(self, layer: str, key: int) -> Tensor | None:
        """Return the random keys of `layer` in the first batch of a pass with `key`; None if it needs none."""
        set_step_key(self.model, StepKey(self.seed, key, 0))
        return self.layers[layer].keys

    def _run(self, key: int) -> Pass:
        self.model.zero_grad(set_to_none=True)
        loss = 0.0
        for index, batch in enumerate(self.batches):
            set_step_key(self.model, StepKey(self.seed, key, index))
            its = self.loss(batch)
            (its * self.loss_scale).backward()
            loss += its.item()
        found = {
            name: p.grad.float() / self.loss_scale for name, p in self.model.named_parameters() if p.grad is not None
        }
        self.model.zero_grad(set_to_none=True)
        for name, parts in self._stacks.items():
            if (stack := found.pop(name, None)) is not None:
                found |= zip(parts, stack.chunk(len(parts)), strict=True)
        return Pass(loss, found)

    @contextmanager
    def _casting(self, recipe: PrecisionConfig, kept: frozenset[str]) -> Iterator[None]:
        before = {name: layer.plan for name, layer in self.layers.items()}
        set_recipe(self.model, recipe, self._num_layers)
        for name, layer in self.layers.items():
            layer.bypass = name in kept
        self.model.eval()  # delayed scales are those that were set
        try:
            yield
        finally:
            for name, layer in self.layers.items():
                layer.plan, layer.bypass = before[name], False

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        handles = [layer.register_forward_hook(self._capture) for layer in self.layers.values()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _capture(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if not isinstance(layer, QuantizedLinear):
            raise TypeError(f"only quantised layers are captured, not {type(layer).__name__}")
        kept = self.tensors[self._names[id(layer)]]
        x = inputs[0].detach().to(output.dtype).flatten(0, -2)  # [M, K], in the dtype of an autocast region
        first = kept.x is None  # of the batches, and of the calls of a layer that is in several places
        if first:
            kept.x = x
        kept.x_amax = max(kept.x_amax, float(x.abs().amax()))

        def look(gradient: Tensor) -> None:
            dy = gradient.detach().flatten(0, -2)  # [M, N]
            if first:
                kept.dy = dy
            kept.dy_amax = max(kept.dy_amax, float(dy.abs().amax()))

        output.register_hook(look)
