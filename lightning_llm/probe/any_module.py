"""Probe of any PyTorch module that was quantized by `quantize`, on given batches: the numbers of the verb `probe`."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema import PrecisionConfig
from lightning_llm.linalg import DTYPES
from lightning_llm.precision.any_module.clock import StepClock
from lightning_llm.precision.any_module.quantize import NativeConv1D, QuantizedConv1D
from lightning_llm.precision.any_module.selection import unwrapped
from lightning_llm.precision.linear.module import QuantizedLinear, quantized_layers
from lightning_llm.precision.native.transformer_engine import NativeLinear
from lightning_llm.probe.measure import measure
from lightning_llm.probe.passes import Passes
from lightning_llm.probe.report import as_json, recipe_lines

Loss = Callable[[nn.Module, Any], Tensor]
"""Function of (module, batch) that returns the batch's mean loss."""


@dataclass(frozen=True)
class ModuleProbe:
    """Result of probing a module: how much each cast of its recipe changes the gradient. `print` shows the report.

    Attributes:
        recipe: the probed recipe.
        figures: its entry under "recipes" in `probe.json` (docs/reference/probe_figures.md): "loss", "gradient",
            "layers", and with attribution "slots" and "keep_high", the layers for the argument `keep` of `quantize`.
    """

    recipe: PrecisionConfig
    figures: dict[str, Any]

    @property
    def layers(self) -> dict[str, dict[str, dict[str, float]]]:
        """{layer: {slot or product: errors}} of each layer by itself (docs/reference/probe_figures.md)."""
        return dict(self.figures["layers"])

    @property
    def keep(self) -> list[str]:
        """The layers that would win back most of the recipe's error if they stayed unquantized; [] if not measured."""
        return list(self.figures.get("keep_high", {}).get("layers", []))

    def as_data(self) -> Any:
        """Return the figures as JSON data; NaN and infinities are strings."""
        return as_json(self.figures)

    def __str__(self) -> str:
        return "\n".join(recipe_lines(self.recipe.name, self.figures))


def probe_module(
    module: nn.Module, batches: Iterable[Any], loss: Loss | None, keys: int, attribute: bool
) -> ModuleProbe:
    """Return the probe of `module` over `batches` (see `lightning_llm.api.probe`).

    `keys`: number of draws of random bits to compare; `attribute`: also attribute the error to slots and layers.

    Raises:
        ConfigError: an argument is invalid, or the module was not quantized by one call of `quantize`.
    """
    root, found = unwrapped(module), [batches] if isinstance(batches, Mapping) else list(batches)
    clock = _clock_of(root)
    problems = [Problem("batches", "is empty. Give at least one batch.")] if not found else []
    if isinstance(keys, bool) or not isinstance(keys, int) or keys < 1:
        problems.append(Problem("keys", "must be an integer of at least 1.", repr(keys)))
    if loss is None and not all(isinstance(each, Mapping) for each in found):
        kinds = type(next(each for each in found if not isinstance(each, Mapping))).__name__
        text = f"must be given for batches of {kinds}: loss=lambda module, batch: ... returns the mean loss of a batch."
        problems.append(Problem("loss", text))
    if any(isinstance(each, DTensor) for each in root.parameters()):
        text = "has sharded parameters. Probe the module in one process, before fully_shard or tensor parallelism."
        problems.append(Problem("module", text))
    if problems:
        raise ConfigError(problems)
    passes = _ModulePasses(root, clock, found, loss or _own_loss)
    delayed = {
        layer.name: {"scale": layer.scale, "amax_history": layer.amax_history}
        for layer in quantized_layers(root)
        if layer.scale is not None and layer.amax_history is not None
    }
    with torch.random.fork_rng(), torch.enable_grad():
        figures = measure(passes, passes.reference(), delayed or None, keys, attribute)
    return ModuleProbe(clock.recipe, figures)


def _clock_of(root: nn.Module) -> StepClock:
    """Return the clock that `quantize` gave to the layers. Raises ConfigError without one, or with several."""
    clocks = {layer.clock for layer in quantized_layers(root)}
    if len(clocks) != 1:
        why = "has no quantized layer" if not clocks else f"has layers of {len(clocks)} calls of quantize"
        raise ConfigError(Problem("module", f"{why}. Call quantize(module, recipe) once, on the whole module."))
    (clock,) = clocks
    if not isinstance(clock, StepClock):
        text = "was built with quantized layers by `train`. Use `lightning-llm probe RUN`, or quantize a plain module."
        raise ConfigError(Problem("module", text))
    return clock


def _own_loss(module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the loss that the module itself computes, as models of transformers do if the batch has labels."""
    made = module(**batch)
    loss = made.get("loss") if isinstance(made, Mapping) else getattr(made, "loss", None)
    if not isinstance(loss, Tensor):
        raise ConfigError(Problem("loss", "must be given: the module returns no loss for these batches."))
    return loss


class _ModulePasses(Passes):
    """Passes of a copy of the module, in evaluation mode, so that neither the module nor its clock change."""

    def __init__(self, root: nn.Module, clock: StepClock, batches: list[Any], loss: Loss):
        model = copy.deepcopy(root).eval()
        for each in model.modules():
            for hooks in (each._forward_pre_hooks, each._forward_hooks):  # the copy's clock
                for number in [key for key, hook in hooks.items() if isinstance(_owner(hook), StepClock)]:
                    del hooks[number]
            if isinstance(each, NativeLinear):  # kernels do not return their casts
                kind = QuantizedConv1D if isinstance(each, NativeConv1D) else QuantizedLinear
                each.__class__ = kind  # type: ignore[assignment]
        super().__init__(model, clock.recipe, clock.num_layers, batches, clock.seed)
        self._loss, self._fp32 = loss, False

    @property
    def compute_dtype(self) -> str:
        """Dtype that the layers multiply in without casts."""
        seen = next((each.x.dtype for each in self.tensors.values() if each.x is not None), torch.float32)
        return next((name for name, dtype in DTYPES.items() if dtype == seen), str(seen))

    def loss(self, batch: Any) -> Tensor:
        """Return the loss of a batch over the number of batches."""
        found = self._loss(self.model, tree_map(self._placed, batch))
        if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
            text = "must return one number that depends on the module's parameters, as a tensor with gradients."
            raise ConfigError(Problem("loss", text))
        return found / len(self.batches)

    def _placed(self, value: Any) -> Any:
        """Return a tensor on the module's device, in fp32 if it is floating and the pass is in fp32."""
        if not isinstance(value, Tensor):
            return value
        return value.to(self.device, torch.float32 if self._fp32 and value.is_floating_point() else value.dtype)

    @contextmanager
    def in_fp32(self) -> Iterator[None]:
        """Context in which parameters, buffers and inputs are fp32. An autocast region within the loss stays."""
        tensors = [each for each in chain(self.model.parameters(), self.model.buffers()) if each.is_floating_point()]
        before = [(each, each.data) for each in tensors if each.dtype != torch.float32]
        self._fp32 = True
        for each, data in before:
            each.data = data.float()
        try:
            yield
        finally:
            self._fp32 = False
            for each, data in before:
                each.data = data


def _owner(hook: Any) -> Any:
    return getattr(hook, "__self__", None)
