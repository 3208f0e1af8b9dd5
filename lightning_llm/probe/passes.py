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

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.config.schema import PrecisionConfig
from lightning_llm.precision.linear.delayed import load_delayed_state, update_delayed
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
        weight_names: {name of a layer: name of its weight among the model's parameters}.
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
        self.layers = {layer.name: layer for layer in quantized_layers(model) if not layer.plan.fixed}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        if experts := [name for name, layer in self.layers.items() if id(layer.weight) not in names]:
            text = f"casts {experts[0]} and other experts, which share a weight, and probing measures whole weights. "
            raise ConfigError(Problem("precision.modules.exclude", f"{text}Add '*.experts.*' to it."))
        self.weight_names = {name: names[id(layer.weight)] for name, layer in self.layers.items()}
        self.loss_scale = 1.0
        self.tensors: dict[str, LayerTensors] = {}

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
        kept = {layer.name: (layer.scale, layer.amax_history) for layer in delayed if layer.name not in missing}
        for layer in delayed:
            seen = self.tensors[layer.name]
            amaxes = {"x": seen.x_amax, "w": float(layer.weight.detach().abs().amax()), "dy": seen.dy_amax}
            length = layer.delayed_config().history_length
            layer.scale = torch.ones(len(ROLES), device=self.device)
            layer.amax_history = torch.zeros(length, len(ROLES), device=self.device)
            layer.amax_history[0] = torch.tensor([amaxes[role] for role in ROLES])
        update_delayed(self.model)
        for name, (scale, history) in kept.items():
            self.layers[name].scale, self.layers[name].amax_history = scale, history

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
        kept = self.tensors[layer.name]
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
