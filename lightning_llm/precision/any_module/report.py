"""The result of `quantize`: layers with and without casts, the step of the training loop, figures of every cast."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.precision.any_module.choice import SHOWN
from lightning_llm.precision.any_module.clock import StepClock
from lightning_llm.precision.linear.delayed import delayed_state, load_delayed_state
from lightning_llm.precision.linear.module import QuantizedLinear, high_precision_forward, quantized_layers
from lightning_llm.precision.linear.plan import ROLES, CastRecord
from lightning_llm.precision.linear.statistics import SUMS, cast_sums, figures

Figures = dict[tuple[str, str], dict[str, float]]
"""{(layer, slot): figures of `precision.linear.statistics`}, of all casts together."""


@contextmanager
def observed(module: nn.Module) -> Iterator[Figures]:
    """Context that observes all casts of `module`; yields a mapping of figures, which is filled at its end.

    Observing changes no bit. On several ranks, each sees its own casts.
    """
    layers, sums, found = quantized_layers(module), dict[tuple[str, str], tuple[Tensor, Tensor]](), Figures()
    before = [layer.observe for layer in layers]
    for layer in layers:
        layer.observe = partial(_add, sums, layer)
    try:
        yield found
    finally:
        for layer, observe in zip(layers, before, strict=True):
            layer.observe = observe
        for key, (total, span) in sums.items():
            found[key] = figures(dict(zip(SUMS, total.tolist(), strict=True)), span[0].item(), span[1].item())


@torch.no_grad()
def _add(sums: dict[tuple[str, str], tuple[Tensor, Tensor]], layer: QuantizedLinear, seen: CastRecord) -> None:
    its_sums, its_span = cast_sums(seen)
    nothing = its_sums.new_tensor([math.inf, -math.inf])
    total, span = sums.get((layer.name, seen.slot), (torch.zeros_like(its_sums), nothing))
    span = torch.stack([torch.minimum(span[0], its_span[0]), torch.maximum(span[1], its_span[1])])
    sums[layer.name, seen.slot] = total + its_sums, span


@dataclass(frozen=True)
class ModuleReport:
    """One linear layer in a `QuantizeReport`: its `name`, and whether it is `quantized`.

    `runs`: how its GEMMs run ("native", "emulated", ...), "" without casts. `reason`: why they run so, or why the layer
    is skipped. `names`: all names of a layer that is registered in several places.
    """

    name: str
    quantized: bool
    reason: str
    runs: Literal["native", "emulated", ""] = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuantizeReport:
    """Report of `quantize`; printed, it is a table.

    Attributes:
        recipe: the recipe.
        modules: one `ModuleReport` per linear layer, in the module's order.
        blocks: where the blocks are, with their number.
        notes: facts that concern the whole module, e.g. keys of the recipe that the training loop must apply itself.
    """

    recipe: PrecisionConfig
    modules: tuple[ModuleReport, ...]
    blocks: str
    notes: tuple[str, ...] = ()
    _clock: StepClock | None = field(default=None, repr=False)

    @property
    def dry_run(self) -> bool:
        """Whether nothing was changed."""
        return self._clock is None

    @property
    def quantized(self) -> list[str]:
        """Names of the quantized layers."""
        return [each.name for each in self.modules if each.quantized]

    @property
    def skipped(self) -> dict[str, str]:
        """{name: reason} of the other linear layers."""
        return {each.name: each.reason for each in self.modules if not each.quantized}

    def __str__(self) -> str:
        would = "would quantize" if self.dry_run else "quantizes"
        first = f"{self.recipe.name} {would} {len(self.quantized)} of {len(self.modules)} linear layers; "
        rows = [(each.name or "(the module)", _state(each), each.reason) for each in self.modules]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        table = [f"  {name:{widths[0]}}  {state:{widths[1]}}  {reason}" for name, state, reason in rows]
        return "\n".join([f"{first}blocks: {self.blocks}", *table, *(f"note: {each}" for each in self.notes)])

    def step(self, n: int, micro_batch: int = 0) -> None:
        """Set the step (from 0) and the micro-batch (from 0, of this rank) of the next forward pass.

        Without an attached optimizer, the loop counts from the first call on: call it before every forward pass, on
        every rank. With one, it only sets the number, e.g. where training resumes.
        """
        for name, value in (("n", n), ("micro_batch", micro_batch)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(Problem(name, "must be an integer of at least 0.", repr(value)))
        self._started("step").go_to(n, micro_batch)

    def attach(self, optimizer: Any) -> None:
        """End a step with each `optimizer.step()`; of several optimizers, pass the one that steps last.

        Raises ConfigError if it has no hooks for its steps; then call `step` in the loop.
        """
        self._started("attach").attach(stepped(optimizer))

    @property
    def at(self) -> tuple[int, int]:
        """The step and the micro-batch that the next training forward pass belongs to."""
        clock = self._started("at")
        return clock.step, clock.micro_batch

    @contextmanager
    def high_precision(self) -> Iterator[None]:
        """Context in which the same weights run without any cast."""
        self._started("high_precision")
        with high_precision_forward(self._module()):
            yield

    @contextmanager
    def health(self) -> Iterator[Figures]:
        """Context in which every cast is observed: {(layer, slot): {"sqnr_db": ..., "underflow_percent": ...}}.

        The mapping is filled when the context ends. `docs/reference/probe_figures.md` explains the figures.
        """
        self._started("health")
        with observed(self._module()) as found:
            yield found

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the delayed scales, to save with a checkpoint. The module's own state has neither."""
        clock = self._started("state_dict")
        scales = {
            f"{layer}.{key}": tensor
            for layer, state in delayed_state(self._module()).items()
            for key, tensor in state.items()
        }
        return {"step": clock.step, "scales": scales}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`. Raises ConfigError for any other mapping, or that of other layers.

        Layers without an entry start from scale 1.
        """
        clock = self._started("load_state_dict")
        nested = _scales_by_layer(state)
        others = sorted(set(nested) - {layer.name for layer in quantized_layers(self._module())})
        if others:
            named = ", ".join(map(repr, others[:SHOWN]))
            text = f"has scales of layers that are not quantized here: {named}. Quantize them, or remove these entries."
            raise ConfigError(Problem("state", text))
        load_delayed_state(self._module(), nested)
        clock.restore(state["step"])

    def _started(self, use: str) -> StepClock:
        if self._clock is None or self._clock.module is None:
            why = "dry_run=True changed nothing" if self._clock is None else "dequantize was called"
            raise ConfigError(Problem(f"report.{use}", f"{why}. Call quantize(module, ...) and use its report."))
        return self._clock

    def _module(self) -> nn.Module:
        module = self._started("module").module
        if module is None:
            raise RuntimeError("the module is gone")
        return module


def _scales_by_layer(state: Any) -> dict[str, dict[str, Tensor]]:
    """Return {layer: {"scale": ..., "amax_history": ...}} of the result of `QuantizeReport.state_dict`.

    Raises:
        ConfigError: `state` is no such result.
    """
    keys = set(state) if isinstance(state, Mapping) else set()
    if not {"step", "scales"} <= keys or not isinstance(state["scales"], Mapping):
        found = f"Its keys: {', '.join(map(str, state)) or 'none'}" if keys else f"It is a {type(state).__name__}"
        text = f"must be the result of report.state_dict(), with step and scales. {found}."
        raise ConfigError(Problem("state", text))
    step, nested = state["step"], dict[str, dict[str, Tensor]]()
    for name, tensor in state["scales"].items():
        layer, _, key = name.rpartition(".")
        nested.setdefault(layer, {})[key] = tensor
    damaged = [layer for layer, tensors in nested.items() if not _are_delayed(tensors)]
    if isinstance(step, bool) or not isinstance(step, int) or step < 0 or damaged:
        wrong = f"scales of {', '.join(map(repr, damaged[:SHOWN]))}" if damaged else f"step {step!r}"
        raise ConfigError(Problem("state", f"is damaged: {wrong}. Save report.state_dict() as it is."))
    return nested


def _are_delayed(tensors: Mapping[str, Any]) -> bool:
    """Whether `tensors` are the delayed scales of one layer: [roles], and their history, [rows, roles]."""
    scale, history = tensors.get("scale"), tensors.get("amax_history")
    if len(tensors) != 2 or not isinstance(scale, Tensor) or not isinstance(history, Tensor):
        return False
    return scale.shape == (len(ROLES),) and history.ndim == 2 and history.shape[1] == len(ROLES)


def _state(each: ModuleReport) -> str:
    return each.runs if each.quantized else "skipped"


def stepped(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer to attach: `optimizer`, the one that accelerate wraps, or the last of a sequence."""
    found = optimizer
    while isinstance(found, Sequence) and found:
        found = found[-1]
    while not hasattr(found, "_optimizer_step_post_hooks") and hasattr(found, "optimizer"):
        found = found.optimizer
    if not hasattr(found, "register_step_post_hook") or not hasattr(found, "_optimizer_step_post_hooks"):
        text = (
            f"is of type {type(optimizer).__name__}, which has no step hooks of torch.optim.Optimizer. Omit it and "
            "call report.step(n, micro_batch=i) before each forward pass."
        )
        raise ConfigError(Problem("optimizer", text))
    result: torch.optim.Optimizer = found
    return result
