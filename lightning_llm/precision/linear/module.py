"""The quantized linear layer as a module, and the state its model shares: step keys, delayed scales, the bypass."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_llm.base.keyed_hash import StepKey, name_word
from lightning_llm.config.schema.precision import DelayedConfig, PrecisionConfig, slots_of
from lightning_llm.linalg.gemm import Reduce, linear, linear_with_unrounded_wgrad
from lightning_llm.linalg.grouped import GroupedLinear
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.cast.random_bits import hash_words
from lightning_llm.precision.linear import autograd
from lightning_llm.precision.linear.autograd import Record, quantized_linear
from lightning_llm.precision.linear.operands import LinearCall, shared
from lightning_llm.precision.linear.plan import KEY_COUNT, ROLES, KeptCasts, LinearPlan, Observe
from lightning_llm.precision.module_rules import rule_in_effect

UNQUANTIZED_CASTS = slots_of(PrecisionConfig(name="high", compute_dtype="fp16"))
VALIDATION_KEY = 1 << 31
"""Added to a validation batch's index, so that its random bits differ from those of all training micro-batches."""


class Clock(Protocol):
    """Interface of a counter of backward passes, for training loops that do not report their micro-batches."""

    def backward_runs(self) -> None:
        """Note that a backward pass is running.

        Layers call it in each backward pass and before each recomputation in it.
        """
        ...


class QuantizedLinear(nn.Linear):
    """Linear layer with the operands of its three GEMMs cast by `plan`. Parameters and their names are nn.Linear's.

    `keys` (int64 [KEY_COUNT]) is set by `set_step_key` before a forward pass; calls keep the tensor they saw for their
    backward pass. `bypass` runs all GEMMs in the dtype of the input; `observe` sees every cast. `scale` and
    `amax_history` are delayed scaling's state: plain attributes, neither parameters nor buffers, since sharding
    frameworks overlook those. `name` keys random bits; `place` is the name that rules of recipes see. `clock` counts
    micro-batches where the training loop does not.
    """

    def __init__(self, name: str, linear: nn.Linear, plan: LinearPlan):
        with torch.device("meta"):
            super().__init__(linear.in_features, linear.out_features, linear.bias is not None)
        self.weight, self.bias = linear.weight, linear.bias
        self.training = linear.training
        self._start(name, plan)

    def _start(self, name: str, plan: LinearPlan, place: str | None = None) -> None:
        """Set the attributes that nn.Linear does not have."""
        self.name, self.plan = name, plan
        self.place = name if place is None else place
        self.keys: Tensor | None = None
        self.bypass = False
        self.observe: Observe | None = None
        self.scale: Tensor | None = None
        self.amax_history: Tensor | None = None
        self.clock: Clock | None = None
        self._adopted: tuple[type[nn.Module], tuple[str, ...]] | None = None
        self._number = autograd.number(self)

    @classmethod
    def adopt(cls, linear: nn.Module, name: str, place: str, plan: LinearPlan) -> Self:
        """Make `linear` an instance of this class, in place: it stays the same object with the same parameters.

        So wrappers, hooks and sharding frameworks that refer to the module keep working. `release` undoes it.
        """
        before, original = set(vars(linear)), type(linear)
        linear.__class__ = _sharded_as(original, cls)
        adopted: Any = linear
        adopted._start(name, plan, place)
        adopted._adopted = original, tuple(set(vars(linear)) - before)
        return adopted

    @property
    def is_adopted(self) -> bool:
        """Whether the module was made by `adopt`, so that `release` can undo it."""
        return self._adopted is not None

    def release(self) -> None:
        """Make an adopted module an instance of its own class again. Raises ValueError if it was not adopted."""
        if self._adopted is None:
            raise ValueError(f"{self.name} was built as a quantized layer and has no other class")
        original, own = self._adopted
        for attribute in own:
            vars(self).pop(attribute, None)
        self.__class__ = _sharded_as(type(self), original)  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"clock": None}  # the clock of a copy's model, which need not be this one

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = autograd.number(self)  # a copy is another layer

    @property
    def matrix(self) -> Tensor:
        """The weight as [out_features, in_features]."""
        return self.weight

    def forward(self, input: Tensor, reduce: Reduce | None = None) -> Tensor:
        """Return the output [..., out_features] for `input` [..., in_features], in its dtype.

        `reduce`: function that calls the product and reduces it over ranks; None: the product alone.
        """
        return self.reduced(input, self.matrix, self.bias, reduce)

    def reduced(self, x: Tensor, weight: Tensor, bias: Tensor | None, reduce: Reduce | None) -> Tensor:
        """Return `reduce(multiply, x, weight, bias)`, or the product itself if `reduce` is None."""
        return self.multiply(x, weight, bias) if reduce is None else reduce(self.multiply, x, weight, bias)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x weight^T + bias` through the plan's casts, for a shard of the weight.

        The bias is added, and its gradient handed on, in the dtype of `x`, as FSDP2 gathers it and as a linear without
        casts does: so every layout has the same bits.
        """
        if not x.is_floating_point():
            raise TypeError(
                f"{self.name}: the input of a linear layer must be of a floating-point dtype, not {x.dtype}."
            )
        device = x.device.type
        if not torch.is_autocast_enabled(device):
            bias = None if bias is None else bias.to(x.dtype)
            return self._without_casts(x, weight, bias) if self.bypass else self._multiply(x, weight, bias)
        x = x.to(torch.get_autocast_dtype(device))  # as nn.Linear's product; casts and scales stay in fp32
        with torch.autocast(device, enabled=False):
            return self.multiply(x, weight, bias)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, unquantized: bool = False) -> Tensor:
        records = self.training and torch.is_grad_enabled() and not unquantized
        if torch.compiler.is_compiling():
            return autograd.operator(x, weight, bias, self._keys_on(x.device), self._number, unquantized, records)
        if self.clock is not None and autograd.in_backward():
            self.clock.backward_runs()
        call = self.call_now(self._keys_on(x.device), x.device, unquantized)
        recorder = self.recorder if records else None
        clock = None if self.clock is None else self.clock.backward_runs
        return quantized_linear(x, weight, bias, call.plan, call.keys, call.scales, recorder, clock)

    @property
    def keys_device(self) -> torch.device:
        """Device on which `keys` should be allocated."""
        return self.weight.device

    def _keys_on(self, device: torch.device) -> Tensor | None:
        """Return the keys on `device`: the module may have been moved since they were set."""
        return self.keys if self.keys is None or self.keys.device == device else self.keys.to(device)

    @contextmanager
    def keys_of(self, sender: int) -> Iterator[None]:
        """Use the keys of `sender` for a while, if there are those of several micro-batches (`set_step_key`)."""
        keys = self.keys
        if keys is not None and keys.ndim > 1:
            self.keys = keys[sender]
        try:
            yield
        finally:
            self.keys = keys

    def _without_casts(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.plan.weight_casts is not None:
            self.plan.weight_casts.check_unquantized()
        if x.dtype == torch.float16 and x.device.type == "cpu":  # where an fp16 GEMM crawls, and is emulated
            return self._multiply(x, weight, bias, unquantized=True)
        if self.plan.wgrad_dtype is not None:
            return linear_with_unrounded_wgrad(x, weight, bias)
        return linear(x, weight.to(x.dtype), bias)

    def call_now(
        self, keys: Tensor | None, device: torch.device, unquantized: bool = False, observed: bool = True
    ) -> LinearCall:
        """Return the layer's current plan with `keys` and its delayed scales; `unquantized`: a call without casts.

        Delayed scales that do not exist yet start at 1 on `device`. `observed`: casts are reported to `observe`.
        """
        if unquantized:
            return LinearCall(replace(self.plan, casts=UNQUANTIZED_CASTS), None, None)
        if self.plan.delayed_casts():
            self.materialise_state(device)
        observe = self.observe if observed else None
        return LinearCall(self.plan if observe is None else replace(self.plan, observe=observe), keys, self.scale)

    @property
    def recorder(self) -> Record | None:
        """Function (role, tensor) that adds the tensor's amax to the history; None without delayed scales.

        A recomputation merges the same amax again, which changes nothing.
        """
        return self._record if self.plan.delayed_casts() else None

    def keep_weight_casts(self, rotated: bool) -> None:
        """Cache casts of the weight within each training step, where they have the same bits (`KeptCasts`)."""
        self.plan = self.plan.with_weight_casts(KeptCasts(rotated))

    def delayed_config(self) -> DelayedConfig:
        """Return the settings of delayed scaling, the same for all casts of a layer.

        Raises LookupError if no cast is delayed.
        """
        for cast in self.plan.delayed_casts().values():
            if cast.delayed is not None:
                return cast.delayed
        raise LookupError(f"{self.name} has no delayed scale")

    def reset_delayed(self) -> None:
        """Delete the state of delayed scaling; the next forward pass starts from scale 1."""
        self.scale = self.amax_history = None

    def materialise_state(self, device: torch.device) -> None:
        """Move the state of delayed scaling to `device`; create it, with scale 1 and no amaxes, if there is none."""
        if self.scale is not None and self.amax_history is not None:
            if self.scale.device != device:  # the module was moved
                self.scale, self.amax_history = self.scale.to(device), self.amax_history.to(device)
        else:
            with torch.inference_mode(False):  # a first forward pass in inference mode; training updates it in place
                self.scale = torch.ones(len(ROLES), device=device)
                self.amax_history = torch.zeros(self.delayed_config().history_length, len(ROLES), device=device)

    def _record(self, role: str, tensor: Tensor) -> None:
        """Merge the amax of `tensor`, which is `role`'s in this micro-batch, into the row of the next update."""
        if role in self.plan.delayed_casts() and self.amax_history is not None:
            source = self.plan.weight_casts if role == "w" else None
            amax = None if source is None else source.known_amax()
            if amax is None:
                made_by = inductor.tensor_amax(self.plan.backend)
                tensor = tensor.detach()
                if role == "w":
                    amax = made_by(tensor)
                else:
                    amax = shared.of(tensor, f"amax of {role}", made_by, lambda: made_by(tensor))
                if source is not None:
                    source.tell_amax(amax)
            row = self.amax_history[0, ROLES.index(role)]
            row.copy_(torch.fmax(row, amax))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.casts_text()}"

    def casts_text(self) -> str:
        """Return the formats by slot, e.g. "fprop.x=e4m3, fprop.w=e4m3"."""
        return ", ".join(f"{slot}={cast.format}" for slot, cast in self.plan.casts.items() if cast.quantizes)


def _sharded_as(current: type[nn.Module], wanted: type[nn.Module]) -> type[nn.Module]:
    """Return `wanted`, as FSDP2 derives it if `current` is such a class: `fully_shard` was called on the layer."""
    if not issubclass(current, FSDPModule):
        return wanted
    if issubclass(wanted, FSDPModule):
        return wanted
    own = {"__deepcopy__": vars(current)["__deepcopy__"]} if "__deepcopy__" in vars(current) else {}
    return type(f"FSDP{wanted.__name__}", (FSDPModule, wanted), own)


def quantized_layers(model: nn.Module) -> list[QuantizedLinear]:
    """Return the quantized layers of `model` in module order, including one per expert of each grouped linear."""
    found: list[QuantizedLinear] = []
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            found.append(module)
        elif isinstance(module, GroupedLinear):
            found += getattr(module, "experts", ())
    return found


def set_step_key(model: nn.Module, key: StepKey, at_once: Sequence[int] = ()) -> None:
    """Set the random keys of all quantized layers of `model` for one micro-batch. Call it before each forward pass.

    A layer's key depends on its name, so it is the same on every pipeline stage. One tensor is made for all layers.
    `at_once`: the micro-batches that ranks run now and whose rows experts here take; their keys are those of each of
    these, int64 [S, KEY_COUNT].
    """
    layers = [layer for layer in quantized_layers(model) if layer.plan.random]
    experts = [layer for layer in layers if at_once and layer.place != layer.name]
    alone = [layer for layer in layers if not (at_once and layer.place != layer.name)]
    for some, micro_batches in ((alone, [key.micro_batch]), (experts, at_once)):
        if not some:
            continue
        names = torch.tensor([name_word(layer.name) for layer in some])[:, None]
        slots = torch.arange(KEY_COUNT)[None, :]
        device = some[0].keys_device
        each = [hash_words(key.step, number, names, slots, seed=key.seed) for number in micro_batches]
        keys = each[0] if some is alone else torch.stack(each, 1)
        keys = keys if device.type == "meta" else keys.to(device)  # layers move them to their inputs' device
        for layer, row in zip(some, keys.unbind(0), strict=True):
            layer.keys = row


def recompute_contexts(
    model: nn.Module,
) -> Callable[[], tuple[AbstractContextManager[None], AbstractContextManager[None]]]:
    """Return `context_fn` for `torch.utils.checkpoint.checkpoint` (non-reentrant) over a part of `model`.

    The recomputation then sees the keys of the forward pass it repeats, also where other micro-batches ran in between,
    and no observer sees its casts a second time. It computes as many products as that pass, because selective
    checkpointing returns saved results in order: an observed pass shares no casts, so its recomputation does not
    either.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        layers = quantized_layers(model)
        again = [(layer.keys, None if layer.observe is None else _unseen) for layer in layers]
        return _repeated(layers, None), _repeated(layers, again)

    return contexts


def _unseen(cast: Any) -> None:
    """Observe a cast that was seen before."""


@contextmanager
def _repeated(
    layers: list[QuantizedLinear], again: Sequence[tuple[Tensor | None, Observe | None]] | None
) -> Iterator[None]:
    """Set the layers' keys and observers for a while, None leaves them; no cast from outside it is shared within."""
    before = [(layer.keys, layer.observe) for layer in layers]
    shared.forget()
    for layer, (keys, observe) in zip(layers, again or before, strict=True):
        layer.keys, layer.observe = keys, observe
    try:
        yield
    finally:
        for layer, (keys, observe) in zip(layers, before, strict=True):
            layer.keys, layer.observe = keys, observe


@contextmanager
def high_precision_forward(model: nn.Module) -> Iterator[None]:
    """Context in which `model` computes without casts, with the same weights, for validation in high precision."""
    layers = quantized_layers(model)
    for layer in layers:
        layer.bypass = True
    try:
        yield
    finally:
        for layer in layers:
            layer.bypass = False


def set_recipe(model: nn.Module, recipe: PrecisionConfig, num_layers: int) -> None:
    """Change the casts of the quantized layers, e.g. at the start of a phase: `recipe.at(step, max_steps)`.

    `num_layers`: blocks of the whole model. Layers that the swap left unquantized stay so; unused delayed scales are
    kept.
    """
    for layer in quantized_layers(model):
        if not layer.plan.fixed:
            rule = rule_in_effect(layer.place, recipe, num_layers)
            layer.plan = replace(layer.plan, casts=recipe.casts_under(rule), rule=rule)
