"""The precision recipe in the training loop: random keys, phases, delayed scales, loss scale, validation without
casts."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.config.schema import PrecisionConfig
from lightning_llm.config.schema.precision import LossScalingConfig
from lightning_llm.linalg import local
from lightning_llm.parallel.layout import Layout
from lightning_llm.precision.cast.inductor import Backend
from lightning_llm.precision.linear.delayed import delayed_state, load_delayed_state, update_delayed
from lightning_llm.precision.linear.module import (
    VALIDATION_KEY,
    QuantizedLinear,
    high_precision_forward,
    quantized_layers,
    set_recipe,
    set_step_key,
)
from lightning_llm.precision.linear.operands import shared
from lightning_llm.precision.linear.swap import EMULATED, SwapReport, sum_in_fp32, swap_linears
from lightning_llm.precision.loss_scale import LossScale
from lightning_llm.precision.module_rules import block_of
from lightning_llm.precision.native.decide import Decision


class Quantization:
    """A precision recipe applied to one model through training: swap of layers, phases, random keys, delayed scales."""

    def __init__(
        self,
        recipe: PrecisionConfig,
        seed: int,
        max_steps: int,
        decision: Decision = EMULATED,
        backend: Backend | None = None,
    ):
        """Keep the recipe's settings; `swap` applies them to a model.

        Args:
            recipe: the precision recipe.
            seed: of stochastic rounding.
            max_steps: number of steps of the run, of which phases are fractions.
            decision: whether casts and GEMMs run natively on this machine, or are emulated.
            backend: implementation of emulated casts; None: chosen by the recipe and this machine.
        """
        self.recipe = recipe
        self.decision, self.backend = decision, backend
        self.seed = seed
        self.max_steps = max_steps
        self.report: SwapReport | None = None
        self._num_layers = 0
        self._in_force = recipe.at(0, 1)  # the phase of step 0, applied by the swap
        self._overflow: Tensor | None = None
        self._scales_at_start: list[tuple[QuantizedLinear, Tensor | None, Tensor | None]] = []

    def swap(self, model: nn.Module, num_layers: int, device_type: str, sharded: bool = False) -> None:
        """Replace the linear layers of `model` that the recipe quantizes, in place, while it is on the meta device.

        `report` then lists replaced and kept layers. Also called for recipes without casts, which may set
        `wgrad_dtype`. `sharded`: FSDP2 will gather the weights.
        """
        sum_in_fp32()
        self._num_layers = num_layers
        self.report = swap_linears(model, self.recipe, num_layers, device_type, self.backend, self.decision, sharded)

    def watch_overflow(self, model: nn.Module) -> None:
        """Check the inputs of quantized layers for Inf and NaN, if the recipe enables it.

        A saturating cast turns them into finite numbers, so the loss scaler might see only finite gradients.
        """
        scaling = self.recipe.loss_scaling
        if scaling is None or scaling.detect != "operands":
            return
        flag = self._overflow = torch.zeros((), dtype=torch.bool, device=next(model.parameters()).device)

        def look(tensor: Tensor) -> None:
            flag.logical_or_(~torch.isfinite(tensor).all())

        def after_forward(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if torch.is_grad_enabled() and output.requires_grad:
                look(inputs[0].detach())
                output.register_hook(look)

        for layer in quantized_layers(model):
            layer.register_forward_hook(after_forward)

    def take_overflow(self) -> Tensor | None:
        """Return whether an operand was Inf or NaN since the last call, as a bool tensor; None if that is not
        checked."""
        if self._overflow is None:
            return None
        seen = self._overflow.clone()
        self._overflow.zero_()
        return seen

    def describe(self) -> str | None:
        """Return a line with the layers that are cast and how casts run; None for a recipe without casts."""
        if self.report is None or self.report.coverage is None:
            return None
        if self.decision.runs == "native":
            how = f"native ({self.decision.reason})"
        else:
            how = f"emulated, {self.report.backend} (precision.casts={self.recipe.casts})"
        reasons = Counter(self.report.kept.values())
        kept = [f"{count} high ({why})" for why, count in reasons.items()]
        line = "; ".join([f"casts  {self.report.coverage.text}, {how}", *kept])
        notes = [] if self.report.note is None else [self.report.note]
        if self.decision.runs != "native" and self.decision.problems:
            notes.insert(0, f"not native: {self.decision.reason}")
        return "\n       ".join([line, *notes])

    def begin_step(self, model: nn.Module, step: int) -> None:
        """Apply the recipe's phase of step number `step` (from 0) to `model`, before its forward pass."""
        recipe = self.recipe.at(step, self.max_steps)
        if recipe != self._in_force:
            set_recipe(model, recipe, self._num_layers)
            self._in_force = recipe
        if self.recipe.updates_every_micro_batch:  # updates create new tensors, so these references stay valid
            self._scales_at_start = [(each, each.scale, each.amax_history) for each in quantized_layers(model)]

    def keep_weight_casts(self, model: nn.Module, blocks: Mapping[int, bool]) -> None:
        """Let layers cache casts of their weights within a step, while weights do not change.

        `blocks`: {index of a block: whether to cache the rotated (Hadamard) cast, too}; other blocks cache nothing.
        """
        for layer in quantized_layers(model):
            index = block_of(layer.name)
            if not layer.plan.fixed and index is not None and index in blocks:
                layer.keep_weight_casts(blocks[index])

    @contextmanager
    def weights_held(self, model: nn.Module) -> Iterator[None]:
        """Context of a step's forward and backward passes, in which weights do not change, so that casts may be
        cached."""
        sources = [each.plan.weight_casts for each in quantized_layers(model) if each.plan.weight_casts is not None]
        for source in sources:
            source.begin_step()
        try:
            yield
        finally:
            shared.forget()
            for source in sources:
                source.end_step()

    def undo_step(self) -> None:
        """Restore the delayed scales from the start of the step in progress, because it is repeated or ends the run."""
        for layer, scale, history in self._scales_at_start:
            layer.scale, layer.amax_history = scale, history

    def begin_micro_batch(self, model: nn.Module, step: int, micro_batch: int, at_once: Sequence[int] = ()) -> None:
        """Set the random keys of the next forward and backward pass; `micro_batch` is the global index.

        `at_once`: those of the ranks that send rows to the experts here, this one's included.
        """
        set_step_key(model, StepKey(self.seed, step, micro_batch), at_once)

    def begin_validation_batch(self, model: nn.Module, step: int, index: int, at_once: Sequence[int] = ()) -> None:
        """Set the random keys of a validation batch's forward pass; `at_once`: see `begin_micro_batch`."""
        key = StepKey(self.seed, step, VALIDATION_KEY + index)
        set_step_key(model, key, [VALIDATION_KEY + each for each in at_once])

    def end_micro_batch(self, model: nn.Module, reduce_max: Callable[[Tensor], Tensor]) -> None:
        """Update the delayed scales that change with every micro-batch, after its backward pass. Collective.

        Data-parallel ranks run one micro-batch each at the same time. `reduce_max` takes the maximum of amaxes over
        them, and one update follows. So scales depend on the number of ranks.
        """
        if self.recipe.updates_every_micro_batch:
            update_delayed(model, reduce_max, "micro_batch")

    def end_step(self, model: nn.Module, reduce_max: Callable[[Tensor], Tensor]) -> None:
        """Update the delayed scales that change with every step. Collective.

        `reduce_max` returns the elementwise maximum of a tensor of amaxes over ranks.
        """
        update_delayed(model, reduce_max, "step")

    @property
    def changes_forward(self) -> bool:
        """Whether validation with the recipe differs from validation without casts."""
        rules = range(len(self._in_force.modules.casts or ()))
        sets = [self._in_force.casts_under(rule) for rule in (None, *rules)]
        return any(casts[slot].quantizes for casts in sets for slot in ("fprop.x", "fprop.w"))

    @contextmanager
    def high_precision(self, model: nn.Module) -> Iterator[None]:
        """Context in which the model's forward pass uses the same weights without any cast."""
        with high_precision_forward(model):
            yield

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the state of delayed scaling: tensors by "<layer>.scale" and "<layer>.amax_history"."""
        return {
            f"{layer}.{key}": tensor for layer, state in delayed_state(model).items() for key, tensor in state.items()
        }

    def load_state(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        """Restore the result of `state`; layers without an entry (saved with another recipe) start from scale 1."""
        nested: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            layer, _, key = name.rpartition(".")
            nested.setdefault(layer, {})[key] = tensor
        if quantized_layers(model):
            load_delayed_state(model, nested)


class LossScaler:
    """Loss scaling, as `torch.amp.GradScaler`, but over all ranks, with hysteresis and a minimum scale."""

    def __init__(self, config: LossScalingConfig | None):
        """`config`: None: no loss scaling; the scale is 1."""
        self.config = config
        self.state = LossScale.initial(config) if config else None

    @property
    def scale(self) -> float:
        """Factor of the loss before backward; 1 without loss scaling."""
        return self.state.scale if self.state else 1.0

    @property
    def can_back_off(self) -> bool:
        """Whether the scale can still be lowered after an overflow."""
        return self.config is not None and self.scale > self.config.floor

    def describe(self) -> dict[str, Any]:
        """Return the entries of a step's record: the scale; {} without loss scaling."""
        return {"loss_scale": self.scale} if self.state else {}

    def unscale(self, parameters: list[nn.Parameter], layout: Layout, overflow: Tensor | None) -> Tensor | None:
        """Divide all gradients by the scale, in place; return whether any rank saw an overflow. Collective.

        Call it once per step, before clipping. Like GradScaler, it checks the divided gradients for Inf and NaN.
        `overflow`: a bool tensor, whether this rank has seen one elsewhere; None if that is not checked. Returns 1 or 0
        on the device, None without loss scaling.
        """
        if self.state is None:
            return None
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / self.state.scale)
        found = gradients[0].new_zeros((), dtype=torch.bool) if overflow is None else overflow
        filled = [gradient for gradient in gradients if gradient.numel()]  # a rank's shard may have no rows
        if filled:
            largest = torch.stack([norm.float() for norm in torch._foreach_norm(filled, float("inf"))])
            found = found | ~torch.isfinite(largest).all()
        return layout.reduce(found.int(), dist.ReduceOp.MAX, "world")

    def update(self, overflow: bool) -> None:
        """Change the scale after a step: lower it after an `overflow`, raise it after enough steps without one."""
        if self.state is not None and self.config is not None:
            self.state = self.state.after_step(overflow, self.config)
