"""Steps and micro-batches of a training loop that does not report them: random keys, phases, delayed scales.

A micro-batch ends with its backward pass, a step with `optimizer.step()`, also if GradScaler skips the update. So a
loop needs no further calls, and the keys are those of `train`.
Nothing here is part of a compiled graph: layers report a backward pass where their operators run, and the hook on the
module only distinguishes validation from training.
"""

import copy
import functools
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.precision.linear.autograd import in_backward
from lightning_llm.precision.linear.delayed import update_delayed
from lightning_llm.precision.linear.module import VALIDATION_KEY, quantized_layers, set_recipe, set_step_key
from lightning_llm.precision.linear.operands import shared


class StepClock:
    """Counts the steps and micro-batches of one module, and gives its quantized layers their random keys.

    `micro_batch` is the number of this rank's micro-batch, from 0 in each step. If no optimizer is attached, the first
    optimizer that steps a parameter of the module is attached. If the training loop calls `go_to` instead, it counts
    itself. A copy of the module gets its own clock, which starts without an optimizer.
    """

    def __init__(
        self,
        recipe: PrecisionConfig,
        num_layers: int,
        seed: int,
        max_steps: int | None,
        group: dist.ProcessGroup | None = None,
        micro_batches: int | None = None,
    ):
        """`num_layers`: number of blocks of the module. `group`: data-parallel ranks; None: all ranks.

        `micro_batches`: number per rank and step, if each rank numbers its micro-batches consecutively; else None.
        """
        self.recipe, self.num_layers, self.seed, self.max_steps = recipe, num_layers, seed, max_steps
        self.group, self.micro_batches = group, micro_batches
        self.step = self.micro_batch = self.validation_batch = self.steps_ended = 0
        self.by_hand = False
        self._in_force = recipe.at(0, 1)
        self._reset()

    def _reset(self) -> None:
        self.module: nn.Module | None = None
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._in_backward = self._had_backward = False
        self._keys_of: tuple[int, int, bool] | None = None  # step, micro-batch or validation batch, validation
        _watch_optimizers()
        _running.add(self)

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("module", "group", "_optimizer")
        return {key: value for key, value in vars(self).items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, group=None)
        self._reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> "StepClock":
        memo[id(self)] = made = object.__new__(StepClock)
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        made.group = self.group  # which a pickle cannot hold, and a copy in the same process shares
        return made

    def start(self, module: nn.Module) -> None:
        """Begin to count the passes of `module`, which must call `before_forward` before each forward pass."""
        self.module = module
        for layer in quantized_layers(module):
            layer.clock = self
        self._set_keys()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Attach `optimizer`: each of its steps ends a step of the module."""
        self._optimizer, self.by_hand = weakref.ref(optimizer), False

    def ends_with(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether a step of `optimizer` ends a step of the module.

        Attaches `optimizer` if none is attached and it fits.
        """
        attached = None if self._optimizer is None else self._optimizer()
        if attached is None and not self.by_hand and self.module is not None:
            own = set(map(id, self.module.parameters()))
            if any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
                self.attach(optimizer)
                return True
        return attached is optimizer

    def stop(self) -> None:
        """Remove every hook."""
        _running.discard(self)
        self._optimizer = None
        if self.module is not None:
            for hooks in (self.module._forward_pre_hooks, self.module._forward_hooks):
                for number in [each for each, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                    del hooks[number]
            self.module = None

    def before_forward(self, module: nn.Module, _: Any) -> None:
        """Set the random keys of the forward pass: of a validation batch (no gradients), or of a micro-batch."""
        if torch.compiler.is_compiling() or in_backward():
            return
        if self.module is not module:  # a copy
            self.start(module)
        self._in_backward = False  # an exception may have ended the last one
        shared.forget()  # the loop may have written to its inputs in a way that torch does not see, through numpy say
        if not module.training and not torch.is_grad_enabled():
            self._set_keys((self.step, self.validation_batch, True))
            self.validation_batch += 1
        elif self._keys_of != self._now:
            self._set_keys()

    def after_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        """Make the backward pass restore the keys of this forward pass, so that recomputations repeat its bits."""
        if torch.compiler.is_compiling() or in_backward() or not torch.is_grad_enabled():
            return
        keys_of = self._keys_of
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(lambda _: self._repeat(keys_of))

    def _repeat(self, keys_of: tuple[int, int, bool] | None) -> None:
        self.backward_runs()  # which may reach no quantized layer, if those are frozen
        if keys_of != self._keys_of:
            self._set_keys(keys_of)

    def backward_runs(self) -> None:
        """Note that a backward pass is running; its end ends the micro-batch.

        Each layer calls this in each backward pass.
        """
        if self._in_backward:
            return
        self._in_backward = True
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        self._in_backward, self._had_backward = False, True
        if not self.by_hand:
            self._update_scales("micro_batch")
            self.micro_batch += 1
            self._set_keys()

    def end_step(self) -> None:
        """End the step, after the update of the weights: update delayed scales and phases, and set the next keys."""
        self._update_scales("step")
        self.steps_ended += 1
        self._begin(self.step + 1, 0)

    def go_to(self, step: int, micro_batch: int) -> None:
        """Set the step and micro-batch of the next forward pass.

        If no optimizer is attached, the loop counts from now on.
        """
        self.by_hand = self._optimizer is None
        if self.by_hand and self._had_backward and (step, micro_batch) != (self.step, self.micro_batch):
            self._update_scales("micro_batch")
            if step != self.step:
                self._update_scales("step")
        self._begin(step, micro_batch)

    def restore(self, step: int) -> None:
        """Continue at `step` after a checkpoint, counting steps as before (by an optimizer or by the loop)."""
        self._begin(step, 0)

    def _begin(self, step: int, micro_batch: int) -> None:
        self.step, self.micro_batch, self.validation_batch, self._had_backward = step, micro_batch, 0, False
        recipe = self.recipe.at(step, self.max_steps or 1)
        if recipe != self._in_force and self.module is not None:
            set_recipe(self.module, recipe, self.num_layers)
            self._in_force = recipe
        self._set_keys()

    @property
    def _now(self) -> tuple[int, int, bool]:
        return self.step, self.micro_batch, False

    def _set_keys(self, keys_of: tuple[int, int, bool] | None = None) -> None:
        """Set the keys of a (step, batch, whether it is of validation), None: of training now."""
        if self.module is None:
            return
        shared.forget()
        step, own, validation = self._keys_of = self._now if keys_of is None else keys_of
        key = StepKey(self.seed, step, self._numbered(own, validation))
        set_step_key(self.module, key)

    def _numbered(self, own: int, validation: bool) -> int:
        """Return the number of batch `own` of this rank among those of all ranks.

        Rank r of R has r + R i for its i-th, as in `train` under FSDP2; with n = `micro_batches` r n + i for i < n, as
        in `train` under DDP.
        """
        rank, ranks = self._rank()
        if validation:
            return VALIDATION_KEY + own * ranks + rank
        consecutive = self.micro_batches is not None and own < self.micro_batches
        return rank * (self.micro_batches or 0) + own if consecutive else own * ranks + rank

    def _update_scales(self, after: Any) -> None:
        if self.module is not None:
            update_delayed(self.module, self._largest if self._rank()[1] > 1 else None, after)

    def _rank(self) -> tuple[int, int]:
        """Return this rank among the data-parallel ranks, and their number."""
        if not (dist.is_available() and dist.is_initialized()):
            return 0, 1
        return dist.get_rank(self.group), dist.get_world_size(self.group)

    def _largest(self, amax: Tensor) -> Tensor:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=self.group)
        return amax


_running: "weakref.WeakSet[StepClock]" = weakref.WeakSet()


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """End the step of each clock that `optimizer` ends."""
    for clock in list(_running):
        if clock.ends_with(optimizer):
            clock.end_step()


@functools.cache
def _watch_optimizers() -> None:
    """Have torch call `_after_step` after each step of any optimizer, and after each that GradScaler skips.

    The hook stays, since torch may be calling it. GradScaler has no hooks, and does not call an optimizer to skip it.
    """
    register_optimizer_step_post_hook(_after_step)
    step = torch.amp.GradScaler.step

    @functools.wraps(step)
    def step_or_skip(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        before = {clock: clock.steps_ended for clock in _running}
        result = step(scaler, optimizer, *args, **kwargs)
        for clock, ended in before.items():
            if clock.steps_ended == ended and clock.ends_with(optimizer):
                clock.end_step()
        return result

    torch.amp.GradScaler.step = step_or_skip  # type: ignore[assignment,method-assign]
