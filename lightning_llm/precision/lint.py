"""Combinations that are known to break, as rules over a recipe. Pure: needs neither torch nor a model.

Each rule is a function that yields problems; its docstring's first line is what the documentation lists, its `Source`
line says who found out. The schema refuses what has no meaning; these rules refuse what has one and fails.
"""

from collections.abc import Callable, Iterator

from lightning_llm.errors import Problem
from lightning_llm.schema.precision import CastConfig, PhaseConfig, PrecisionConfig, slots_of

Rule = Callable[[PrecisionConfig, dict[str, CastConfig]], Iterator[Problem]]
GRADIENTS = ("dgrad.dy", "wgrad.dy")
GEMMS = {"fprop": ("fprop.x", "fprop.w"), "dgrad": ("dgrad.dy", "dgrad.w"), "wgrad": ("wgrad.dy", "wgrad.x")}


def _mx_gradients_in_e5m2(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """MXFP8 with E5M2 gradients: the block scale already gives the range, and two mantissa bits diverge.

    Source: NVIDIA-NeMo/Megatron-Bridge PR #638 (`hybrid` -> `e4m3` mended a diverging MXFP8 recipe).
    """
    for slot in GRADIENTS:
        if slots[slot].format == "e5m2" and slots[slot].scale.startswith("e8m0"):
            yield Problem(
                f"{slot}.format",
                "e5m2 with an e8m0 block scale is known to make MXFP8 diverge (Megatron-Bridge PR #638). Set e4m3: "
                "a scale per block leaves nothing for the wider exponent to do.",
            )


def _e5m2_forward(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """E5M2 weights or activations: two mantissa bits where range is not needed.

    Source: Micikevicius et al., arXiv 2209.05433, section 3; Transformer Engine refuses `Format.E5M2` alone.
    """
    for slot in GEMMS["fprop"]:
        if slots[slot].format == "e5m2":
            yield Problem(f"{slot}.format", "e5m2 is for gradients (arXiv 2209.05433). Set e4m3 in the forward GEMM.")


def _delayed_with_high_blocks(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """Delayed scaling with first or last blocks in high precision: the amax reduction would lack those layers.

    Source: Megatron-LM asserts it (`first_last_layers_bf16`); Transformer Engine cannot mix autocast per layer.
    """
    if not any(cast.scale == "delayed" for cast in slots.values()):
        return
    for key in ("first_blocks_high", "last_blocks_high"):
        if count := getattr(recipe.modules, key):
            yield Problem(
                f"modules.{key}",
                f"{count} does not go with scale: delayed (Megatron-LM asserts against it). Set it to 0, or take "
                "current scaling (scale: fp32), which is the recipe that keeps first and last blocks high.",
            )


def _fp16_hides_overflow(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """fp16 with saturating formats and no look at the operands: Inf becomes a number, so no step is skipped.

    Source: Transformer Engine casts with saturation (`__NV_SATFINITE`); E2M1 turns NaN into 6 as well.
    """
    scaling = recipe.loss_scaling
    if recipe.compute_dtype != "fp16" or scaling is None or scaling.detect == "operands":
        return
    for slot in GRADIENTS:
        if slots[slot].quantises:
            yield Problem(
                "loss_scaling.detect",
                f"'{scaling.detect}' misses an overflow that {slot} ({slots[slot].format}) saturates away, so the "
                "scale would never come down. Set detect: operands.",
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
        if recipe.compute_dtype == "fp16" and slots[slot].scale == "delayed":
            yield Problem(
                f"{slot}.scale", "delayed freezes on the first overflow of fp16 loss scaling. Use scale: fp32."
            )


def _fp16_with_four_bits(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """Four-bit formats over fp16: published for bf16 only, and E2M1 hides both Inf and NaN.

    Source: arXiv 2502.20586, 2505.14669 and Transformer Engine's NVFP4 recipe, all bf16.
    """
    for slot, cast in slots.items():
        if recipe.compute_dtype == "fp16" and cast.format == "e2m1":
            yield Problem(f"{slot}.format", "e2m1 was only ever trained over bf16. Set compute_dtype: bf16.")


def _clipped_stochastic(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """Stochastic E2M1 under a floor scale without the 3/4: elements above 6 clip, so the estimate is biased.

    Source: Tseng, Yu and Park, arXiv 2502.20586, section 3 (unbiased only after scaling by 3/4).
    """
    for slot, cast in slots.items():
        if cast.stochastic and cast.scale == "e8m0_floor" and cast.format == "e2m1" and cast.prescale > 0.75:
            yield Problem(
                f"{slot}.prescale",
                f"{cast.prescale} lets stochastic rounding clip at 6 and lean (arXiv 2502.20586). Set 0.75.",
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
    return f"size {cast.hadamard.size} signs {cast.hadamard.signs} {cast.hadamard.vector or ''}".strip()


def _biased_gradients(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """QuEST's clipping scale on a gradient: it clips seven percent of a Gaussian, which biases the gradient.

    Source: Castro et al. (Quartet), arXiv 2505.14669: QuEST forward, unbiased rounding backward.
    """
    for slot, cast in slots.items():
        if cast.scale == "quest" and not slot.startswith("fprop"):
            yield Problem(
                f"{slot}.scale", "quest clips, which biases gradients (arXiv 2505.14669). Use e8m0_floor and SR."
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
        elif not slots[forward].quantises and slots[forward].hadamard is None:
            yield Problem(f"{slot}.source", f"'quantised' needs a format in {forward}. Set high_precision.")


def _delayed_slots_differ(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """Delayed slots of one tensor in different formats, or with different histories: they share one scale.

    Source: Transformer Engine keeps one scale per tensor (input, weight, gradient), one history length per recipe.
    """
    delayed = {slot: cast for slot, cast in slots.items() if cast.scale == "delayed"}
    for slot, cast in delayed.items():
        if cast.delayed != next(iter(delayed.values())).delayed:
            yield Problem(f"{slot}.delayed", f"differs from {next(iter(delayed))}'s. Give all delayed slots the same.")
        for other, its in delayed.items():
            if other.split(".")[1] == slot.split(".")[1] and its.format != cast.format and slot < other:
                yield Problem(f"{other}.format", f"'{its.format}' shares a scale with {slot} ('{cast.format}').")


def _clip_without_rotated_backward(recipe: PrecisionConfig, slots: dict[str, CastConfig]) -> Iterator[Problem]:
    """`clip_gradient` where the backward GEMMs take high-precision operands: the mask belongs to fprop's rotation.

    Source: Castro et al. (Quartet), arXiv 2505.14669, algorithm 1.
    """
    for forward, backward in (("fprop.x", "dgrad.w"), ("fprop.w", "wgrad.x")):
        if slots[forward].clip_gradient and slots[backward].source != "quantised":
            yield Problem(f"{forward}.clip_gradient", f"needs {backward}.source: quantised. Set it, or drop the mask.")


RULES: tuple[Rule, ...] = (
    _mx_gradients_in_e5m2,
    _e5m2_forward,
    _delayed_with_high_blocks,
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


def lint(recipe: PrecisionConfig, key: str = "precision") -> list[Problem]:
    """Return every known-bad combination in `recipe` and its phases, keys under `key`; empty if none is known."""
    problems = []
    parts: list[tuple[str, PrecisionConfig | PhaseConfig]] = [(key, recipe)]
    parts += [(f"{key}.phases.{index}", phase) for index, phase in enumerate(recipe.phases)]
    for prefix, part in parts:
        for rule in RULES:
            for each in rule(recipe, slots_of(part)):
                shared = each.key.startswith(("modules.", "loss_scaling"))
                problems.append(Problem(f"{key if shared else prefix}.{each.key}", each.text))
    return list(dict.fromkeys(problems))
