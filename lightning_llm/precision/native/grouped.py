"""Linears of experts in Transformer Engine: one `GroupedLinear` for all experts, or one `Linear` for each.

`GroupedLinear` casts each expert's rows by that expert's own quantizer with the kernel of a single linear
(`multi_tensor_quantize_impl`, csrc/extensions/cast.cpp, 2.20), and calls the GEMM of a single linear for each expert,
several at a time (`nvte_multi_tensor_gemm`). So it computes the recipe of single linears, except for

- delayed scales, which are cast by another kernel, and whose amaxes belong to single layers;
- NVFP4, whose kernel casts all experts at once and draws the random bits of all from one state, but the recipe keys
  them by expert;
- experts with different casts, by rules of `precision.modules`.

Those take a `Linear` for each expert that has rows, with the casts, scales and random bits of a dense layer. So do
weights that FSDP2 gathers: `GroupedLinear` would keep every expert's codes until the backward pass, which the library's
linears do not.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_llm.linalg import local
from lightning_llm.linalg.grouped import GroupedLinear, Groups
from lightning_llm.precision.linear.grouped import QuantizedGroupedLinear
from lightning_llm.precision.linear.plan import LinearPlan
from lightning_llm.precision.native.express import MULTIPLES, NativeRecipe, express, why_one_by_one
from lightning_llm.precision.native.main_grad import MainGrad
from lightning_llm.precision.native.transformer_engine import NativeLinear, engine, recipe_object


class _Expert(NativeLinear):
    """One expert's linear. Its casts of the weight are made in each micro-batch: those of all experts at once are."""

    def keep_weight_casts(self, rotated: bool) -> None:
        """Keep nothing."""


class NativeGroupedLinear(QuantizedGroupedLinear):
    """`QuantizedGroupedLinear` with GEMMs in Transformer Engine; parameters, names and state are the same.

    `one_by_one`: never call the library for all experts at once.
    """

    def __init__(
        self, name: str, linear: GroupedLinear, plans: Sequence[LinearPlan], multiple: int, sharded: bool = False
    ):
        """`sharded`: FSDP2 gathers the weight for each use."""
        self.sharded, self.one_by_one = sharded, False
        natives = [native for plan in plans if (native := express(plan.casts)[0]) is not None]
        multiples = {MULTIPLES[native.kind] for native in natives}  # or each call would copy rows to fill up blocks
        super().__init__(name, linear, plans, math.lcm(multiple, *multiples))
        self._forget()

    def _expert(self, name: str, shape: nn.Linear, plan: LinearPlan) -> NativeLinear:
        return _Expert(name, shape, plan, self.sharded)

    def _forget(self) -> None:
        self._plans: list[LinearPlan] = []
        self._native: NativeRecipe | None = None
        self._recipe: Any = None
        self._kernel: tuple[Any, ...] = ()  # one, in a tuple so that it is no submodule

    def __getstate__(self) -> dict[str, Any]:  # a copy makes its own kernel
        return super().__getstate__() | {"_plans": [], "_native": None, "_recipe": None, "_kernel": ()}

    def forward(
        self, x: Tensor, groups: Groups, first: int = 0, weight: Tensor | None = None, sender: int = 0
    ) -> Tensor:
        """Return `[M, N]` as the base class does, by one call of the library for all experts where that is exact."""
        counts = groups.counts
        native = self._recipe_of_all(first, len(counts))
        fits = native is not None and not any(count % MULTIPLES[native.kind] for count in counts)
        if not fits or not len(x) or torch.is_autocast_enabled(x.device.type):
            return super().forward(x, groups, first, weight, sender)
        return self._at_once(x, counts, local(self.weight) if weight is None else weight)

    def _recipe_of_all(self, first: int, count: int) -> NativeRecipe | None:
        """Return the recipe by which `GroupedLinear` can cast for all of the experts; None if it cannot now."""
        experts = self.experts[first : first + count]
        if self.one_by_one or any(expert.bypass or expert.observe is not None for expert in experts):
            return None
        if len(self._plans) != count or any(
            plan is not expert.plan for plan, expert in zip(self._plans, experts, strict=True)
        ):
            self._forget()
            self._plans = [expert.plan for expert in experts]
            sets = [plan.casts for plan in {id(plan): plan for plan in self._plans}.values()]
            native = express(sets[0])[0]
            if native is not None and why_one_by_one(native, self.sharded) is None and sets[1:] == sets[:-1]:
                self._native, self._recipe = native, recipe_object(native)
        return self._native

    @torch.compiler.disable  # a compiled block runs it as it is
    def _at_once(self, x: Tensor, counts: list[int], weight: Tensor) -> Tensor:
        """Return `[M, N]`: `counts[e]` rows of `x` `[M, K]` times expert e of `weight` `[E N, K]`, transposed."""
        if not self._kernel:
            self._kernel = (self._new_kernel(len(counts), x),)
        (kernel,) = self._kernel
        if self._plans[0].wgrad_dtype is None:
            parts = weight.to(x.dtype).chunk(len(counts))
        else:
            parts = tuple(MainGrad.cast(part, x.dtype) for part in weight.chunk(len(counts)))
        own = {f"weight{number}": part for number, part in enumerate(parts)}
        kernel.__dict__.update(own)
        try:
            with engine().pytorch.autocast(enabled=True, recipe=self._recipe):
                y: Tensor = kernel(x, torch.tensor(counts))
        finally:
            for name in own:
                del kernel.__dict__[name]
            for part in parts:
                MainGrad.let_go(part)
        return y

    def _new_kernel(self, count: int, x: Tensor) -> Any:
        kernel = engine().pytorch.GroupedLinear(
            count,
            self.in_features,
            self.out_features,
            bias=False,
            params_dtype=torch.bfloat16,
            device="meta",
            fuse_wgrad_accumulation=self._plans[0].wgrad_dtype is not None,
            save_original_input=False,
            single_grouped_weight=False,
            single_grouped_bias=False,
            use_grouped_tensor=False,  # its path casts all experts by one quantizer, and wants other versions
        )
        for number in range(count):
            delattr(kernel, f"weight{number}")  # ours are put in their place for each call
            setattr(kernel, f"bias{number}", x.new_empty(0))
        return kernel
