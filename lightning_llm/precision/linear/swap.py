"""Replace a model's linear layers by quantized ones, by name, before anything is sharded or initialized."""

from dataclasses import dataclass

import torch
from torch import nn

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema.precision import PrecisionConfig, slots_of
from lightning_llm.linalg.gemm import CastOnUse
from lightning_llm.linalg.grouped import GroupedLinear
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.cast.inductor import Backend
from lightning_llm.precision.linear.grouped import QuantizedGroupedLinear, row_multiple
from lightning_llm.precision.linear.module import QuantizedLinear
from lightning_llm.precision.linear.plan import LinearPlan, wgrad_dtype_of
from lightning_llm.precision.module_rules import (
    Coverage,
    coverage,
    expert_place,
    nothing_converted,
    reasons_to_stay_unquantized,
    rule_in_effect,
)
from lightning_llm.precision.native.decide import Decision

EMULATED = Decision("emulated")


@dataclass(frozen=True)
class SwapReport:
    """Result of `swap_linears`. `converted`: names of replaced layers. `kept`: {name: why it stays unquantized}.

    `backend`: how emulated casts run, with the reason in `note` if they are slow. `decision`: whether the converted
    layers run natively, and why not. `coverage`: counts of quantized layers and blocks; None for a recipe without
    casts.
    """

    converted: tuple[str, ...]
    kept: dict[str, str]
    backend: Backend
    note: str | None
    decision: Decision
    coverage: Coverage | None = None


def sum_in_fp32() -> None:
    """Set torch to sum CUDA's 16-bit GEMMs in fp32 also where a kernel splits the summed axis, as emulated GEMMs do.

    Otherwise unquantized layers of a recipe would differ from the baseline's.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def choose_backend(recipe: PrecisionConfig, device_type: str) -> tuple[Backend, str | None]:
    """Return (how casts run on a device type by `recipe.casts`, a note with the reason if that is slow, else None).

    Raises ConfigError if they should be compiled and cannot be.
    """
    if not recipe.quantizes:
        return "eager", None
    if recipe.casts == "eager":
        return "eager", "casts run eagerly, some ten times slower, since precision.casts=eager asks for it"
    sum_in_fp32()  # a kernel is kept for the state of torch that it was made in
    reason = inductor.why_not(device_type)
    if reason is None:
        return "compiled", None
    if recipe.casts == "compiled":
        text = (
            f"is not possible here: {reason}. Fix that, or set eager or auto, which are slower and give the same bits."
        )
        raise ConfigError(Problem("precision.casts", text, "compiled"))
    return "eager", f"casts run eagerly, some ten times slower: {reason}"


def swap_linears(
    model: nn.Module,
    recipe: PrecisionConfig,
    num_layers: int,
    device_type: str,
    backend: Backend | None = None,
    decision: Decision = EMULATED,
    sharded: bool = False,
) -> SwapReport:
    """Replace the layers that `recipe` quantizes; parameters stay the same objects under the same names.

    `num_layers`: blocks of the whole model, since first and last count by global index. `backend` None: by
    `choose_backend`. `decision`: whether Transformer Engine runs them; `sharded`: FSDP2 will gather the weights. A
    recipe in fp16 swaps every linear on a CPU, where an fp16 GEMM is emulated. Raises ConfigError if a recipe with
    casts converts no layer, or casts should be compiled and cannot be.
    """
    note = None
    native = recipe.quantizes and decision.runs == "native"
    if native:
        backend = "eager"
    elif backend is None:
        backend, note = choose_backend(recipe, device_type)
    first = recipe.at(0, 1)  # the casts of the first step
    emulate = recipe.compute_dtype == "fp16" and device_type == "cpu"
    casts = slots_of(PrecisionConfig(name="high", compute_dtype=recipe.compute_dtype))
    unquantized = LinearPlan(casts, backend, fixed=True, wgrad_dtype=wgrad_dtype_of(recipe))
    kinds = nn.Linear | GroupedLinear
    linears = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    experts = {name: module.groups for name, module in linears.items() if isinstance(module, GroupedLinear)}
    reasons = reasons_to_stay_unquantized(linears, recipe, num_layers, experts)
    if problems := nothing_converted(recipe, reasons):
        raise ConfigError(problems)
    multiple = row_multiple(recipe.cast_sets().values())
    for name, module in linears.items():
        if isinstance(module, GroupedLinear):  # its products of fp16 on a CPU are exact without casts
            if reasons[name] is None:
                places = (expert_place(name, number) for number in range(module.groups))
                rules = [rule_in_effect(place, first, num_layers) for place in places]
                made_by = {rule: LinearPlan.from_recipe(first, backend, rule) for rule in dict.fromkeys(rules)}
                plans = [made_by[rule] for rule in rules]
                grouped = name, module, plans, multiple
                experts_made = _native_grouped(*grouped, sharded) if native else QuantizedGroupedLinear(*grouped)
                _replace(model, name, experts_made)
        elif reasons[name] is None or emulate:
            rule = rule_in_effect(name, first, num_layers)
            plan = LinearPlan.from_recipe(first, backend, rule) if reasons[name] is None else unquantized
            made = _native(name, module, plan, sharded) if native else QuantizedLinear(name, module, plan)
            _replace(model, name, made)
    if recipe.wgrad_dtype is not None:
        for each in model.modules():
            if isinstance(each, CastOnUse):
                each.rounds_wgrad = False
    kept = {name: why for name, why in reasons.items() if why is not None}
    converted = tuple(name for name in reasons if name not in kept)
    return SwapReport(converted, kept, backend, note, decision, coverage(recipe, linears, num_layers, experts))


def _native(name: str, module: nn.Linear, plan: LinearPlan, sharded: bool) -> QuantizedLinear:
    # Imported late, because it imports Transformer Engine.
    from lightning_llm.precision.native.transformer_engine import NativeLinear

    return NativeLinear(name, module, plan, sharded)


def _native_grouped(
    name: str, module: GroupedLinear, plans: list[LinearPlan], multiple: int, sharded: bool
) -> QuantizedGroupedLinear:
    from lightning_llm.precision.native.grouped import NativeGroupedLinear

    return NativeGroupedLinear(name, module, plans, multiple, sharded)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
