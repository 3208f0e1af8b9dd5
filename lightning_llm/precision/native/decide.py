"""Native support: the recipes that Transformer Engine runs on a device, and why not the others. Imports no torch.

A recipe is native only if one configuration of Transformer Engine 2.20 makes its six casts exactly: a candidate is read
off the recipe, written out as the casts that the library makes of it, and compared slot by slot. What differs, in
whatever small way, is refused with the reason, and then runs emulated.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from lightning_llm.config.schema.precision import HIGH, CastConfig, DelayedConfig, HadamardConfig, PrecisionConfig
from lightning_llm.errors import Problem
from lightning_llm.precision.native.capability import Capability

Kind = Literal["delayed", "current", "subchannel", "mxfp8", "nvfp4"]
Runs = Literal["native", "emulated", "refused"]

NAMES: dict[Kind, str] = {
    "delayed": "Float8Quantizer",
    "current": "Float8CurrentScaling",
    "subchannel": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
"""What runs each kind, by Transformer Engine's names. DelayedScaling itself is not used: it updates its scales at the
end of every autocast, over the whole job, and the recipe says when (`DelayedConfig.update`); so the scales are ours."""
MULTIPLES: dict[Kind, int] = {"delayed": 16, "current": 16, "subchannel": 128, "mxfp8": 32, "nvfp4": 32}
"""What a linear's sizes must be multiples of (`assert_dim_for_fp8_exec`, each quantiser's `is_quantizable`); every axis
is some GEMM's contraction axis, so the strictest of the rules holds for all. Tokens are padded with zero rows."""
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


@dataclass(frozen=True)
class NativeRecipe:
    """One configuration of Transformer Engine. `gradient`: the format of dY; "high": a backward pass in compute_dtype.

    `square`: one scale for both directions of the weight (32x32, 16x16); `rotated`, `stochastic`: NVFP4's switches.
    """

    kind: Kind
    gradient: str
    power_of_two: bool = False
    square: bool = False
    rotated: bool = False
    stochastic: bool = False
    delayed: DelayedConfig | None = None

    @property
    def name(self) -> str:
        """What runs it, in Transformer Engine's words."""
        return NAMES[self.kind]


def casts_of(native: NativeRecipe) -> dict[str, CastConfig]:
    """Return the six casts that Transformer Engine makes of a configuration (its 2.20 sources, `quantization.py`)."""
    if native.kind == "nvfp4":
        x, w, dy, turned_dy, turned_x = _nvfp4_casts(native)
    else:
        x, w, dy = _fp8_casts(native)
        turned_dy, turned_x = dy, x
    if native.gradient == "high":
        return {"fprop.x": x, "fprop.w": w, **dict.fromkeys(("dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x"), HIGH)}
    return {"fprop.x": x, "fprop.w": w, "dgrad.dy": dy, "dgrad.w": w, "wgrad.dy": turned_dy, "wgrad.x": turned_x}


def _fp8_casts(native: NativeRecipe) -> tuple[CastConfig, CastConfig, CastConfig]:
    gradient = "e4m3" if native.gradient == "high" else native.gradient
    scale = "power_of_two" if native.power_of_two else "fp32"
    blocks = {"delayed": ("tensor", "tensor"), "current": ("tensor", "tensor"), "subchannel": ("1x128", "128x128")}
    if native.kind == "mxfp8":
        blocks["mxfp8"], scale = ("1x32", "32x32" if native.square else "1x32"), "e8m0_ceil"
    if native.kind == "delayed":
        scale = "delayed"
    row, weight = blocks[native.kind]
    made = [
        CastConfig.model_validate({"format": number, "block": block, "scale": scale, "delayed": native.delayed})
        for number, block in (("e4m3", row), ("e4m3", weight), (gradient, row))
    ]
    return made[0], made[1], made[2]


def _nvfp4_casts(native: NativeRecipe) -> tuple[CastConfig, CastConfig, CastConfig, CastConfig, CastConfig]:
    x = CastConfig(format="e2m1", block="1x16", scale="two_level_e4m3")
    w = x.model_copy(update={"block": "16x16"}) if native.square else x
    dy = x.model_copy(update={"rounding": "stochastic", "noise_bits": 8}) if native.stochastic else x
    transform = HadamardConfig(size=16, signs="fixed", vector=_SIGNS, round_to="bf16") if native.rotated else None
    return x, w, dy, dy.model_copy(update={"hadamard": transform}), x.model_copy(update={"hadamard": transform})


def express(casts: Mapping[str, CastConfig]) -> tuple[NativeRecipe | None, list[tuple[str, str]]]:
    """Return the configuration that makes exactly `casts`, or None and what differs: (slot, text) pairs."""
    x, dy = casts["fprop.x"], casts["dgrad.dy"]
    kind = _kind(x)
    if x == HIGH:
        return None, [("fprop.x", "high: Transformer Engine quantises no backward pass without the forward pass")]
    if kind is None:
        return None, [("fprop.x", f"{_words(x)}: Transformer Engine has no recipe with such an input")]
    backward = any(cast != HIGH for slot, cast in casts.items() if not slot.startswith("fprop"))
    candidate = NativeRecipe(
        kind,
        dy.format if backward else "high",
        power_of_two=x.scale == "power_of_two",
        square=casts["fprop.w"].block in ("32x32", "16x16"),
        rotated=casts["wgrad.x"].hadamard is not None,
        stochastic=dy.stochastic,
        delayed=x.delayed,
    )
    if backward and not dy.quantises:
        return None, [("dgrad.dy", "high: Transformer Engine quantises either all of the backward pass or none of it")]
    if kind == "delayed" and not backward:
        return None, [("dgrad.dy", "high: Transformer Engine has no delayed scaling of the forward pass alone")]
    if dy.quantises and (dy.format == "e2m1") != (kind == "nvfp4"):
        return None, [("dgrad.dy", f"{_words(dy)}: Transformer Engine has none such beside {_words(x)} inputs")]
    made = casts_of(candidate)
    differences = [
        (slot, f"{_words(casts[slot])}, and Transformer Engine's {candidate.name} has {_words(made[slot])}")
        for slot in casts
        if _without_scope(casts[slot]) != made[slot]
    ]
    return (None, differences) if differences else (candidate, [])


def _kind(x: CastConfig) -> Kind | None:
    kinds: dict[tuple[str, str, str], Kind] = {
        ("e4m3", "tensor", "delayed"): "delayed",
        ("e4m3", "tensor", "fp32"): "current",
        ("e4m3", "tensor", "power_of_two"): "current",
        ("e4m3", "1x128", "fp32"): "subchannel",
        ("e4m3", "1x128", "power_of_two"): "subchannel",
        ("e4m3", "1x32", "e8m0_ceil"): "mxfp8",
        ("e2m1", "1x16", "two_level_e4m3"): "nvfp4",
    }
    return kinds.get((x.format, x.block, x.scale))


def _without_scope(cast: CastConfig) -> CastConfig:
    """Return `cast` without `amax_scope`: no layout that runs natively splits a tensor of a linear over ranks."""
    return cast.model_copy(update={"amax_scope": "logical"})


def _words(cast: CastConfig) -> str:
    """Return e.g. "e2m1 1x32 e8m0_floor stochastic", and every other key that has not its default."""
    if not cast.quantises:
        return "high" if cast == HIGH else f"high, but rotated or of {cast.source}"
    parts = [cast.format, cast.block, cast.scale, *([] if cast.rounding == "even" else [cast.rounding])]
    rest = cast.model_dump(exclude_defaults=True, exclude={"format", "block", "scale", "rounding", "amax_scope"})
    return " ".join([*parts, *(f"{key}={_brief(value)}" for key, value in rest.items() if value != {})])


def _brief(value: object) -> str:
    if isinstance(value, Mapping):
        return "(" + " ".join(f"{key}={each}" for key, each in value.items() if key != "vector") + ")"
    return str(value)


@functools.cache
def native_recipes(recipe: PrecisionConfig) -> tuple[dict[str, NativeRecipe], tuple[Problem, ...]]:
    """Return the configuration for each set of casts that can have one, by the keys of `cast_sets`, and every problem.

    Casts that quantise nothing need no configuration: their GEMMs run in compute_dtype.
    """
    found, problems = dict[str, NativeRecipe](), []
    for key, casts in recipe.cast_sets().items():
        if all(cast == HIGH for cast in casts.values()):
            continue
        native, differences = express(casts)
        prefix = f"precision.{key}" if key else "precision"
        problems += [Problem(f"{prefix}.{slot}", f"is {text}.") for slot, text in differences]
        if native is None:
            continue
        found[key] = native
        if recipe.compute_dtype == "fp32":
            problems.append(Problem("precision.compute_dtype", "is fp32, and native GEMMs here take bf16 or fp16."))
        if native.kind == "nvfp4" and recipe.compute_dtype == "fp16":
            problems.append(Problem("precision.compute_dtype", "is fp16, and NVFP4's rotation takes bf16 alone."))
    return found, tuple(dict.fromkeys(problems))


def native_recipe(recipe: PrecisionConfig) -> tuple[NativeRecipe | None, tuple[Problem, ...]]:
    """Return the first of `native_recipes`, that of the recipe's own slots if there is one, and every problem."""
    found, problems = native_recipes(recipe)
    return next(iter(found.values()), None), problems


def device_problems(native: NativeRecipe, here: Capability) -> list[str]:
    """Return what this machine lacks for `native`, with the numbers (Transformer Engine 2.20, `check_*_support`)."""
    if here.compute_capability is None or here.cuda is None:
        return [each for each in (here.problem or "no CUDA device", here.library_problem) if each]
    compute, cuda, problems = here.compute_capability, here.cuda, []
    has = f"{here.device} has compute capability {compute[0]}.{compute[1]}"
    lowest = {"delayed": (8, 9), "current": (8, 9), "subchannel": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
    if compute < lowest[native.kind]:
        problems.append(f"{native.name} needs compute capability >= {'.'.join(map(str, lowest[native.kind]))}, {has}")
    if native.kind == "nvfp4":
        problems += _four_bit_problems(native, compute, has)
    if compute >= (12, 0) and native.kind in ("mxfp8", "subchannel"):
        through = "'s MXFP8 GEMMs" if native.kind == "subchannel" else "'s GEMMs"
        problems.append(f"{native.name}{through} are for compute capability 10.0 to 11.x, {has}")
    if native.kind == "subchannel" and compute >= (10, 0) and not native.power_of_two:
        problems.append(f"{native.name} needs power-of-two scales from compute capability 10.0 on, {has}")
    newest = {"subchannel": (12, 9), "delayed": (12, 1), "current": (12, 1)}.get(native.kind, (12, 8))
    if cuda < newest:
        problems.append(f"{native.name} needs CUDA >= {newest[0]}.{newest[1]}, torch has {cuda[0]}.{cuda[1]}")
    if here.library_problem:
        problems.append(here.library_problem)
    return problems


def _four_bit_problems(native: NativeRecipe, compute: tuple[int, int], has: str) -> list[str]:
    """Return what NVFP4's kernels get wrong beyond compute capability 10.x, where NVIDIA's matrix says "Partial".

    Source: https://nvidia.github.io/TransformerEngine/support_matrix.html; NVIDIA/TransformerEngine issue 3062 (the
    rotation's kernel asks for more shared memory than 12.x has) and pull request 3281 (the rounding instruction is that
    of 10.0 and 10.3 alone; without it all gradients were zero, now software rounds).
    """
    problems = []
    if native.rotated and compute >= (12, 0):
        problems.append(f"{native.name}'s rotation does not run from compute capability 12.0 on (issue 3062), {has}")
    if native.stochastic and compute >= (11, 0):
        problems.append(f"{native.name}'s stochastic rounding is checked on compute capability 10.x alone, {has}")
    return problems


def size_problems(native: NativeRecipe, widths: Mapping[str, int], bias: str | None) -> list[Problem]:
    """Return which sizes of a model's linears (by key) its kernels refuse, with the multiples; `bias`: see `decide`."""
    multiple = MULTIPLES[native.kind]
    problems = [
        Problem(key, f"is {width}, no multiple of {multiple}, as {native.name} needs.")
        for key, width in widths.items()
        if width % multiple
    ]
    if bias:
        text = "gives linears a bias, and how a native kernel sums its gradient is not checked against the recipe's."
        problems.append(Problem(bias, text))
    return problems


def shared_problems(native: NativeRecipe, shared: Mapping[str, str]) -> list[Problem]:
    """Return which of the degrees of tensor, context and pipeline parallelism, by key, its kernels know nothing of."""
    problems = []
    for key, degree in shared.items():
        why = "and Transformer Engine would see a rank's part of a tensor alone"
        if key == "parallel.pp":
            why = (
                "and kernels draw the bits of stochastic rounding from one generator per GPU, seeded before a "
                "micro-batch's forward pass: a stage's backward pass, which draws them, comes after others' forward "
                "passes, and all stages would draw the same"
            )
        if key != "parallel.pp" or native.stochastic:
            problems.append(Problem(key, f"is {degree}, {why}: 1 is needed."))
    return problems


@dataclass(frozen=True)
class Decision:
    """How a recipe's quantised GEMMs run on one machine, and why not natively (`problems`, empty where they do).

    `software`: why GEMMs of what is not quantised are emulated as well, None where they are not.
    """

    runs: Runs
    natives: tuple[NativeRecipe, ...] = ()
    problems: tuple[Problem, ...] = ()
    library: str | None = None
    software: str | None = None

    def facts(self) -> dict[str, str]:
        """Return it as plain data."""
        return {"runs": self.runs, "reason": self.reason}

    def refusals(self) -> list[Problem]:
        """Return what to tell who asked for `precision.backend=native` where it cannot be had; empty where it can."""
        if self.runs != "refused":
            return []
        return [
            Problem(each.key, f"is 'native', and {each.text}. Take auto or emulated.")
            if each.key == "precision.backend"
            else Problem(each.key, f"{each.text.rstrip('.')}; so precision.backend=native cannot be. Take auto.")
            for each in self.problems
        ]

    @property
    def reason(self) -> str:
        """Why it is so, in one line."""
        if self.runs == "native":
            names = dict.fromkeys(native.name for native in self.natives)
            return f"Transformer Engine {self.library}, {' and '.join(names)}" if names else "not quantised"
        return "; ".join(dict.fromkeys(_sentence(problem) for problem in self.problems))


def _sentence(problem: Problem) -> str:
    text = problem.text.rstrip(".")
    return text if problem.key == "precision.backend" else f"{problem.key} {text}"


def decide(
    recipe: PrecisionConfig,
    here: Capability,
    widths: Mapping[str, int] | None = None,
    bias: str | None = None,
    shared: Mapping[str, str] | None = None,
) -> Decision:
    """Return how `recipe` runs on `here` for a model whose linears have `widths` (sizes by key; None: sizes that fit).

    `bias`: the key that gives them one, None where none has it. `shared`: the degrees above 1 of tensor, context and
    pipeline parallelism, by key. A recipe whose layers have different casts is native only if all of them are.
    `precision.backend=native` makes "refused" of what would be emulated.
    """
    if recipe.compute_dtype == "fp16" and here.compute_capability is None:
        software = "on a CPU fp16 is a format, and GEMMs run in fp32"
        high = recipe.model_copy(update={"compute_dtype": "bf16"})
        decision = decide(high, here, widths, bias, shared) if recipe.quantises else Decision("emulated")
        why = decision.problems or (Problem("precision.backend", software),)
        return replace(decision, problems=why, software=software)
    if not recipe.quantises:
        return Decision("native")
    found, differences = native_recipes(recipe)
    natives, problems = tuple(dict.fromkeys(found.values())), list(differences)
    for native in natives:
        problems += size_problems(native, widths or {}, bias)
        problems += shared_problems(native, shared or {})
        problems += [Problem("precision.backend", text) for text in device_problems(native, here)]
    problems = list(dict.fromkeys(problems))
    if recipe.backend == "emulated":
        return Decision("emulated", problems=(Problem("precision.backend", "precision.backend=emulated asks for it"),))
    if recipe.backend == "native" and problems:
        return Decision("refused", (), tuple(problems))
    if here.compute_capability is None:  # what else stands in the way matters where there is a GPU
        return Decision("emulated", problems=(Problem("precision.backend", here.problem or "no CUDA device"),))
    return Decision("emulated", (), tuple(problems)) if problems else Decision("native", natives, library=here.library)
