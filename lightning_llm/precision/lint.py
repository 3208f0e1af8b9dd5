"""Rules against combinations in a recipe that are known to fail. Needs neither torch nor a model.

Each rule is a function that yields problems; the documentation lists the first line of its docstring and its `Source`.
The schema rejects meaningless values; these rules reject meaningful values that fail. A recipe may break a rule
knowingly by naming it in `allow`, except those in `NOT_TO_ALLOW`.
"""

from collections.abc import Callable, Iterable, Iterator

from lightning_llm.base.errors import Problem, did_you_mean
from lightning_llm.config.schema.precision import CastConfig, PrecisionConfig

Rule = Callable[[PrecisionConfig, dict[str, CastConfig]], Iterator[Problem]]
GRADIENTS = ("dgrad.dy", "wgrad.dy")
GEMMS = {"fprop": ("fprop.x", "fprop.w"), "dgrad": ("dgrad.dy", "dgrad.w"), "wgrad": ("wgrad.dy", "wgrad.x")}


def _mx_gradients_in_e5m2(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """MXFP8 with E5M2 gradients: the block scale already gives the range, and two mantissa bits diverge.

    Source: NVIDIA-NeMo/Megatron-Bridge PR #638 (`hybrid` -> `e4m3` fixed a diverging MXFP8 recipe).
    """
    for slot in GRADIENTS:
        if _has_two_mantissa_bits(slots[slot]) and slots[slot].scale_kind.shares_exponent:
            yield Problem(
                f"{slot}.format",
                "e5m2 with an e8m0 block scale made MXFP8 training diverge (Megatron-Bridge PR #638). Set e4m3: "
                "with a scale per block, the wider exponent is not needed.",
            )


def _e5m2_forward(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """E5M2 weights or activations: two mantissa bits where range is not needed.

    Source: Micikevicius et al., arXiv 2209.05433, section 3; Transformer Engine refuses `Format.E5M2` alone.
    """
    for slot in GEMMS["fprop"]:
        if _has_two_mantissa_bits(slots[slot]):
            yield Problem(f"{slot}.format", "e5m2 is for gradients (arXiv 2209.05433). Set e4m3 in the forward GEMM.")


def _has_two_mantissa_bits(cast: CastConfig) -> bool:
    """Whether a cast is to an FP8 format with two mantissa bits, E5M2."""
    return cast.quantizes and (cast.number_format.code_bits, cast.number_format.mantissa_bits) == (8, 2)


def _fp16_hides_overflow(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """fp16 with saturating formats and no look at the operands: Inf becomes a number, so no step is skipped.

    Source: Transformer Engine casts with saturation (`__NV_SATFINITE`); E2M1 turns NaN into 6 as well.
    """
    scaling = recipe.loss_scaling
    if recipe.compute_dtype != "fp16" or scaling is None or scaling.detect == "operands":
        return
    for slot in GRADIENTS:
        if slots[slot].quantizes:
            yield Problem(
                "loss_scaling.detect",
                f"'{scaling.detect}' misses an overflow that {slot} ({slots[slot].format}) hides by saturating, so the "
                "scale would never decrease. Set detect: operands.",
            )
            return


def _fp16_without_scaling(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """fp16 without loss scaling: small gradients become zero.

    Source: Micikevicius et al., arXiv 1710.03740, section 3.2.
    """
    if recipe.compute_dtype == "fp16" and recipe.loss_scaling is None:
        yield Problem(
            "loss_scaling", "fp16 gradients underflow without it (arXiv 1710.03740). Add a loss_scaling block."
        )


def _fp16_with_delayed_gradients(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """fp16 loss scaling with delayed gradient scales: one overflow writes Inf into the history and freezes the scale.

    Source: Transformer Engine `delayed_scaling.cu` keeps the old scale while amax is not finite.
    """
    for slot in GRADIENTS:
        if recipe.compute_dtype == "fp16" and slots[slot].scale_kind.from_history:
            yield Problem(
                f"{slot}.scale",
                f"{slots[slot].scale} freezes on the first overflow of fp16 loss scaling. Use scale: fp32.",
            )


def _fp16_with_four_bits(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """Four-bit formats over fp16: published for bf16 only, and E2M1 hides both Inf and NaN.

    Source: arXiv 2502.20586, 2505.14669 and Transformer Engine's NVFP4 recipe, all bf16.
    """
    for slot, cast in slots.items():
        if recipe.compute_dtype == "fp16" and cast.quantizes and cast.number_format.code_bits <= 4:
            yield Problem(f"{slot}.format", f"{cast.format} was only ever trained over bf16. Set compute_dtype: bf16.")


def _clipped_stochastic(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """Stochastic four-bit formats under a floor scale that clips (E2M1 without the 3/4): the estimate is biased.

    Source: Tseng, Yu and Park, arXiv 2502.20586, section 3 (unbiased only after scaling by 3/4).
    """
    for slot, cast in slots.items():
        if not cast.stochastic:
            continue
        fmt = cast.number_format
        largest = cast.scale_kind.unclipped_prescale(fmt)
        if fmt.code_bits <= 4 and cast.prescale > largest:
            yield Problem(
                f"{slot}.prescale",
                f"{cast.prescale} lets stochastic rounding clip at {fmt.max:g}, which biases it (arXiv 2502.20586). "
                f"Set {largest:g}.",
            )


def _one_sided_hadamard(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """A Hadamard rotation on one operand of a GEMM, or two that differ: it does not cancel, the product is wrong.

    Source: (A S)(S^T B) = A B needs the same orthogonal S on both sides.
    """
    for gemm, (left, right) in GEMMS.items():
        first, second = _rotation(slots[left]), _rotation(slots[right])
        if first != second:
            yield Problem(
                gemm,
                f"the rotations of its operands must cancel, but {left} has {first} and {right} has {second}. "
                "Give both the same hadamard.",
            )


def _rotation(cast: CastConfig) -> str:
    """Say in words which rotation a cast applies."""
    if cast.hadamard is None:
        return "none"
    other = "" if cast.hadamard.transform == "hadamard" else f"{cast.hadamard.transform} of "
    return f"{other}size {cast.hadamard.size} signs {cast.hadamard.signs} {cast.hadamard.vector or ''}".strip()


def _biased_gradients(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """QuEST's clipping scale on a gradient: it clips seven percent of a Gaussian, which biases the gradient.

    Source: Castro et al. (Quartet), arXiv 2505.14669: QuEST forward, unbiased rounding backward.
    """
    for slot, cast in slots.items():
        if cast.scale_kind.clips and not slot.startswith("fprop"):
            yield Problem(
                f"{slot}.scale",
                f"{cast.scale} clips, which biases gradients (arXiv 2505.14669). Use e8m0_floor and SR.",
            )


def _source_without_quantiser(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """`source: quantised` where fprop quantises nothing, or on dY, which has no earlier quantised form.

    Source: the definition of the slot.
    """
    for slot, cast in slots.items():
        if cast.source != "quantised":
            continue
        forward = {"dgrad.w": "fprop.w", "wgrad.x": "fprop.x"}.get(slot)
        if forward is None:
            yield Problem(f"{slot}.source", "'quantised' exists for dgrad.w and wgrad.x only. Set high_precision.")
        elif not slots[forward].quantizes and slots[forward].hadamard is None:
            yield Problem(f"{slot}.source", f"'quantised' needs a format in {forward}. Set high_precision.")


def _delayed_slots_differ(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """Delayed slots of one tensor in different formats, or with different histories: they share one scale.

    Source: Transformer Engine keeps one scale per tensor (input, weight, gradient), one history length per recipe.
    """
    delayed = {slot: cast for slot, cast in slots.items() if cast.scale_kind.from_history}
    for slot, cast in delayed.items():
        if cast.delayed != next(iter(delayed.values())).delayed:
            yield Problem(f"{slot}.delayed", f"differs from {next(iter(delayed))}'s. Give all delayed slots the same.")
        for other, its in delayed.items():
            if other.split(".")[1] == slot.split(".")[1] and its.format != cast.format and slot < other:
                yield Problem(f"{other}.format", f"'{its.format}' shares a scale with {slot} ('{cast.format}').")


def _clip_without_rotated_backward(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """A gradient rule in a backward slot, or a rotated one where the backward GEMM takes a high-precision operand.

    The rule's factor belongs to the operand of fprop, in the domain of its rotation.

    Source: Castro et al. (Quartet), arXiv 2505.14669, algorithm 1.
    """
    for forward, backward in (("fprop.x", "dgrad.w"), ("fprop.w", "wgrad.x")):
        cast = slots[forward]
        rotated = cast.hadamard is not None and not cast.gradient_kind.is_one
        if (cast.clip_gradient or rotated) and slots[backward].source != "quantised":
            key = "clip_gradient" if cast.clip_gradient else "gradient"
            yield Problem(f"{forward}.{key}", f"needs {backward}.source: quantised. Set it, or remove the rule.")
    for slot, cast in slots.items():
        if cast.gradient != "straight_through" and not slot.startswith("fprop"):
            yield Problem(f"{slot}.gradient", f"'{cast.gradient}' is for the slots of fprop. Remove it.")


RULES: tuple[Rule, ...] = (
    _mx_gradients_in_e5m2,
    _e5m2_forward,
    _fp16_hides_overflow,
    _fp16_without_scaling,
    _fp16_with_delayed_gradients,
    _fp16_with_four_bits,
    _clipped_stochastic,
    _one_sided_hadamard,
    _biased_gradients,
    _source_without_quantiser,
    _delayed_slots_differ,
    _clip_without_rotated_backward,
)
NOT_TO_ALLOW: tuple[Rule, ...] = (
    _one_sided_hadamard,
    _source_without_quantiser,
    _delayed_slots_differ,
    _clip_without_rotated_backward,
)
"""Rules without exception: a recipe that breaks one is computed wrongly or not at all."""


def rule_name(rule: Rule) -> str:
    """Return the name of a rule, as used in the key `precision.allow`."""
    return rule.__name__.lstrip("_")


def lint(recipe: PrecisionConfig) -> list[Problem]:
    """Return the problems of `recipe`: known-bad combinations that it does not allow, and wrong names in `allow`.

    All sets of casts are checked: the recipe's own, those of `modules.casts`, and the phases'.
    """
    allowed, problems, own = recipe.allow or (), [], set[Problem]()
    for prefix, casts in recipe.cast_sets().items():
        for rule in RULES:
            for each in rule(recipe, casts):
                if not prefix:
                    own.add(each)
                elif prefix.startswith("modules.") and each in own:
                    continue  # `modules.casts` inherits it from the recipe's own casts
                if rule_name(rule) not in allowed or rule in NOT_TO_ALLOW:
                    place = "" if each.key.startswith("loss_scaling") else prefix
                    where = ".".join(part for part in ("precision", place, each.key) if part)
                    problems.append(Problem(where, f"{each.text} {_way_round(rule)}"))
    return list(dict.fromkeys(problems)) + _opt_out_problems(recipe)


def _way_round(rule: Rule) -> str:
    name = rule_name(rule)
    if rule in NOT_TO_ALLOW:
        return f"(Rule {name}.)"
    return f"(Rule {name}; precision.allow=[{name}] trains it all the same.)"


def still_broken(recipe: PrecisionConfig, allowed: Iterable[str]) -> tuple[str, ...] | None:
    """Return those of the `allowed` rule names that `recipe` breaks; None if it breaks none of them."""
    sets = recipe.cast_sets().values()
    broken = {rule_name(rule) for rule in RULES for casts in sets if any(True for _ in rule(recipe, casts))}
    return tuple(name for name in allowed if name in broken) or None


def _opt_out_problems(recipe: PrecisionConfig) -> list[Problem]:
    """Return the problems of the rules that a recipe names in `allow`."""
    known, problems, key = {rule_name(rule): rule for rule in RULES}, [], "precision.allow"
    for name in recipe.allow or ():
        if name not in known:
            problems.append(Problem(key, f"has '{name}', which is not a lint rule.{did_you_mean(name, known)}"))
        elif known[name] in NOT_TO_ALLOW:
            problems.append(
                Problem(key, f"has '{name}', which cannot be disabled: the product would be wrong. Remove it.")
            )
        elif not still_broken(recipe, [name]):
            text = f"has '{name}', a rule that the recipe does not break. Drop it: it is part of the recipe's hash."
            problems.append(Problem(key, text))
    return problems
