"""Agreement of Transformer Engine's codes, scales and products with the emulation's, and of compiled with eager
casts."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpu_check import layers, parts, setting
from gpu_check.checks import Call
from gpu_check.journal import Item, Row, guarded, judged, missing
from gpu_check.layers import layer_of, relative
from gpu_check.setting import native_recipes, recipes
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.schema.precision import PrecisionConfig, slots_of
from lightning_llm.linalg.grouped import GroupedLinear, Groups
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.cast.inductor import Backend
from lightning_llm.precision.cast.quantize import Operand
from lightning_llm.precision.cast.scales import Scaled
from lightning_llm.precision.linear.delayed import delayed_state, update_delayed
from lightning_llm.precision.linear.plan import KEY_COUNT
from lightning_llm.precision.linear.swap import swap_linears
from lightning_llm.precision.native.codes import (
    StoredCodes,
    axis_of,
    check_native_casts,
    emulated,
    quantized_by,
    quantizers_of,
    stored,
)
from lightning_llm.precision.native.decide import decide
from lightning_llm.precision.native.express import native_recipe

TOKENS, INPUTS, OUTPUTS = 512, 1024, 768
BACKENDS: tuple[Backend, Backend] = ("eager", "compiled")
PRODUCT_LIMIT = 5e-3
"""Tolerance of two products of the same operands, each summed in fp32 and rounded to bf16: an element may round to the
next bf16 number (2^-8)."""
UNROUNDED_LIMIT = 1e-5
"""Tolerance of two fp32 sums over `TOKENS` products that differ in their order."""
HOPPER_UNROUNDED_LIMIT = 5e-4
"""The same on compute capability 9: Hopper's tensor cores keep about 14 bits of a sum of FP8 products before adding it
in fp32 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). An H200 gave 1.4e-4."""


def items(call: Call) -> list[Item]:
    """Return the items: the library, native recipes, parts on ranks, recipes not for this GPU, compiled casts."""
    here = setting.here()
    native = [recipe for recipe, _ in native_recipes().values()]
    quantizing = [recipe for recipe in recipes().values() if recipe.quantizes]
    emulated = [recipe for recipe in quantizing if decide(recipe, here).runs == "emulated"]
    found = [Item("Transformer Engine", 2, layers.admitted)]
    if here.library_problem is not None:
        problem = here.library_problem
        found.append(Item("native recipes", 0, lambda: iter([missing("native recipes", problem)])))
    found += [Item(recipe.name, 6, partial(agreed, recipe)) for recipe in native]
    reducing = {  # of each library's recipe with a scale per tensor one: its quantizers reduce amaxes over ranks
        each.name: recipe
        for recipe, decision in reversed(native_recipes().values())
        for each in decision.natives
        if each.whole_tensors
    }
    found += [Item(f"{each.name}: parts", 25, partial(parts.on_ranks, each, call)) for each in reducing.values()]
    found += [Item(f"{recipe.name}: fallback", 2, partial(fallback, recipe)) for recipe in emulated]
    casts = [*emulated, *native]  # compiled casts matter less for recipes that run natively, so these come last
    return [*found, *(Item(f"{recipe.name}: compiled casts", 8, partial(compiled_casts, recipe)) for recipe in casts)]


def agreed(recipe: PrecisionConfig) -> Iterator[Row]:
    """Yield the rows of a native recipe: codes and scales, products, history of delayed scales, errors against fp32."""
    yield from guarded(f"{recipe.name}: start-up check", start_up_check, recipe)
    yield from guarded(f"{recipe.name}: operands", operands, recipe)
    yield from guarded(f"{recipe.name}: products", products, recipe)
    yield from guarded(f"{recipe.name}: experts", experts, recipe)
    if "delayed" in {cast.scale for cast in slots_of(recipe).values()}:
        yield from guarded(f"{recipe.name}: history", history, recipe)
    yield from guarded(f"{recipe.name}: exactness", layers.exactness, recipe.name, recipe)


def start_up_check(recipe: PrecisionConfig) -> Iterator[Row]:
    """Yield the check made at the start of a run: without biases, with biases, and with experts.

    With biases another kernel casts and sums dY; with experts one call casts the rows of several.
    """
    for how in ("", " with biases", " with experts"):
        what = f"{recipe.name}: start-up check{how}"
        try:
            unchecked = check_native_casts(
                recipe, torch.device(setting.DEVICE), how == " with biases", experts=how == " with experts"
            )
        except ConfigError as error:
            yield judged(what, 0.0, "", False, "; ".join(each.text for each in error.problems))
        else:
            yield judged(what, 1.0, "", unchecked is None, unchecked or "no difference")


def tensors() -> dict[str, Tensor]:
    """Return inputs in bf16, {"x" [M, K], "w" [N, K], "dy" [M, N]}: rows of very different size, outliers, zeros."""
    device = setting.DEVICE
    generator = torch.Generator(device).manual_seed(0)
    made = {}
    for role, (rows, columns) in {"x": (TOKENS, INPUTS), "w": (OUTPUTS, INPUTS), "dy": (TOKENS, OUTPUTS)}.items():
        tensor = torch.randn(rows, columns, device=device, generator=generator)
        tensor *= torch.exp2(torch.arange(rows, device=device) % 24 - 12.0)[:, None]
        tensor[7] = 0
        tensor[3, 5] = 3000.0
        made[role] = tensor.bfloat16()
    return made


def operands(recipe: PrecisionConfig) -> Iterator[Row]:
    """Yield for each slot the shares of equal codes and equal scales; the target is 100 %."""
    native, _ = native_recipe(recipe)
    given = tensors()
    layer = layer_of(recipe, INPUTS, OUTPUTS)
    with torch.no_grad():
        layer.weight.copy_(given["w"])
    settled(layer)  # creates the quantizers
    if native is None or native.stochastic:
        yield missing(f"{recipe.name}: codes", "drawn from the GPU's own random bits: compared in distribution alone")
        return
    by_role = quantizers_of(layer)
    for slot, cast in slots_of(recipe).items():
        if not cast.quantizes:
            continue
        role = slot.split(".")[1]
        axis = axis_of(slot)
        scale = None if layer.scale is None else layer.scale[("x", "w", "dy").index(role)]
        theirs = stored(
            quantized_by(by_role[role], given[role]), cast, axis, (given[role].shape[0], given[role].shape[1])
        )
        ours = emulated(given[role], cast, axis, scale)
        yield from compare(f"{recipe.name} {slot}", theirs, ours)


def compare(what: str, theirs: StoredCodes, ours: StoredCodes) -> Iterator[Row]:
    """Yield the percentage of native codes, and of scales, that equal the emulated ones."""
    for kind, one, other in zip(("codes", "scales"), theirs, ours, strict=True):
        if one.shape != other.shape:
            yield Row(f"{what}: {kind}", None, "", "off", f"native has {tuple(one.shape)}, ours {tuple(other.shape)}")
            continue
        share = float((one == other).double().mean())
        yield judged(f"{what}: equal {kind}", 100 * share, "%", share == 1, "all")


def settled(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, dx, dw) of a second pass, in which delayed scales come from the amaxes of the first pass."""
    given = tensors()
    x = given["x"].requires_grad_()
    for turn in range(2):
        x.grad = layer.weight.grad = None
        y = layer(x)
        y.backward(given["dy"])
        if turn == 0:
            update_delayed(layer)
    return y.detach(), x.grad, layer.weight.grad  # type: ignore[return-value]


def products(recipe: PrecisionConfig) -> Iterator[Row]:
    """Yield the differences of y, dx and dw between the native and the emulated layer, and of unrounded dw."""
    yield from _differences(recipe, ("y", "dx", "dw"), PRODUCT_LIMIT)
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    limit = HOPPER_UNROUNDED_LIMIT if on_hopper else UNROUNDED_LIMIT
    yield from _differences(recipe.model_copy(update={"wgrad_dtype": "fp32"}), ("dw",), limit)


def _differences(recipe: PrecisionConfig, wanted: tuple[str, ...], limit: float) -> Iterator[Row]:
    found = []
    for backend in ("native", "emulated"):
        layer = layer_of(recipe.model_copy(update={"backend": backend, "casts": "eager"}), INPUTS, OUTPUTS)
        with torch.no_grad():
            layer.weight.copy_(tensors()["w"])
        found.append(settled(layer))
    stochastic = any(cast.stochastic for cast in slots_of(recipe).values())
    for name, native, ours in zip(("y", "dx", "dw"), *found, strict=True):
        if name not in wanted:
            continue
        how = " in fp32" if recipe.wgrad_dtype else ""
        what = f"{recipe.name} {name}{how}: native over emulated, relative difference"
        if stochastic and name != "y":
            yield Row(what, relative(native, ours), "", "measured", "random bits differ")
            continue
        error = relative(native, ours)
        yield judged(what, error, "", error < limit, f"< {limit}")


def experts(recipe: PrecisionConfig) -> Iterator[Row]:
    """Yield the differences of y, dx and dw between native and emulated linears of experts, one of them without rows.

    The note says whether one call of Transformer Engine's GroupedLinear ran them all.
    """
    given, rows, found = tensors(), [TOKENS // 2, 0, TOKENS // 4, TOKENS // 4], []
    device, at_once = torch.device(setting.DEVICE), False
    for backend in ("native", "emulated"):
        torch.manual_seed(0)
        model, own = nn.Module(), recipe.model_copy(update={"backend": backend, "casts": "eager"})
        model.layers = nn.ModuleDict({"1": nn.ModuleDict({"up_proj": GroupedLinear(len(rows), INPUTS, OUTPUTS)})})
        layer: Any = model.to(device).get_submodule("layers.1.up_proj")
        nn.init.normal_(layer.weight, std=INPUTS**-0.5)
        swap_linears(model, own, 3, device.type, decision=decide(own, setting.here()))
        layer = model.get_submodule("layers.1.up_proj")
        for expert in layer.experts:
            expert.keys = torch.arange(KEY_COUNT)
        x = given["x"].clone().requires_grad_()
        y = layer(x, Groups(torch.tensor(rows, device=device), TOKENS))
        y.backward(given["dy"])
        found.append((y.detach(), x.grad, layer.weight.grad))
        at_once |= bool(getattr(layer, "_kernel", ()))
    stochastic = any(cast.stochastic for cast in slots_of(recipe).values())
    note = "GroupedLinear" if at_once else "a linear for each"
    for name, native, ours in zip(("y", "dx", "dw"), *found, strict=True):
        what, error = f"{recipe.name} {name} of experts: native over emulated", relative(native, ours)
        if stochastic and name != "y":
            yield Row(what, error, "", "measured", f"random bits differ; {note}")
        else:
            yield judged(what, error, "", error < PRODUCT_LIMIT, f"< {PRODUCT_LIMIT}; {note}")


def history(recipe: PrecisionConfig) -> Iterator[Row]:
    """Yield whether delayed scales and histories are bitwise equal after three steps of two micro-batches."""
    states = []
    for backend in ("native", "emulated"):
        layer = layer_of(recipe.model_copy(update={"backend": backend, "casts": "eager"}), INPUTS, OUTPUTS)
        with torch.no_grad():
            layer.weight.copy_(tensors()["w"])
        for step in range(3):
            for micro_batch in range(2):
                given = tensors()
                x = (given["x"] * (1 + step + micro_batch)).requires_grad_()
                layer(x).backward(given["dy"] / (1 + step))
            update_delayed(layer)
        states.append(delayed_state(layer)["layers.1.up_proj"])
    for key in ("scale", "amax_history"):
        share = float((states[0][key] == states[1][key]).double().mean())
        yield judged(f"{recipe.name}: equal {key} after three steps", 100 * share, "%", share == 1, "all")


def fallback(recipe: PrecisionConfig) -> Iterator[Row]:
    """Yield whether native execution of a recipe that this GPU lacks is rejected with a reason, and runs emulated."""
    here = setting.here()
    asked = decide(recipe.model_copy(update={"backend": "native"}), here)
    layer = layer_of(recipe.model_copy(update={"casts": "eager"}), INPUTS, OUTPUTS)
    given = tensors()
    x = given["x"].clone().requires_grad_()
    layer(x).backward(given["dy"])
    finite = bool(torch.isfinite(x.grad).all()) if x.grad is not None else False
    holds = asked.runs == "refused" and finite
    yield judged(f"{recipe.name}: refused natively, runs emulated", float(holds), "", holds, asked.reason[:160])


def compiled_casts(recipe: PrecisionConfig) -> Iterator[Row]:
    """Yield the percentage of scales, and of codes times scales, that compiled casts compute bitwise as eager ones."""
    if problem := inductor.why_not(torch.device(setting.DEVICE).type):
        yield missing(f"{recipe.name}: compiled casts", problem)
        return
    given, made = tensors(), dict[Backend, list[Tensor]]()
    key, delayed = torch.tensor(1234, device=setting.DEVICE), torch.tensor(7.3, device=setting.DEVICE)
    for backend in BACKENDS:
        parts: list[Tensor | None] = []

        def see(_: Tensor, scaled: Scaled, operand: Operand, parts: list[Tensor | None] = parts) -> None:
            parts.extend((scaled.multiplier, scaled.block, scaled.tensor, operand.tensor, operand.inside))

        for slot, cast in slots_of(recipe).items():
            if cast.quantizes:
                x = given[slot.split(".")[1]]
                inductor.operand(x, cast, axis_of(slot), backend, key=key, delayed=delayed, observe=see)
        made[backend] = [part.flatten() for part in parts if part is not None]
    equal = [(one == other).double() for one, other in zip(made["eager"], made["compiled"], strict=True)]
    share = float(torch.cat(equal).mean())
    yield judged(f"{recipe.name}: compiled casts equal to eager ones", 100 * share, "%", share == 1, "all")
