"""Decides from a machine's capability whether a recipe runs natively, in layers of given sizes, with the reasons.

Imports no torch, unless `device_here` finds an NVIDIA driver.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import yaml

from lightning_llm.base.errors import Problem
from lightning_llm.base.hardware import has_nvidia_driver
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.precision.native.express import MULTIPLES, NativeRecipe, native_recipes

LIBRARY = (2, 20)
"""The Transformer Engine release that this code is written for; later minor releases are accepted."""


@dataclass(frozen=True)
class Capability:
    """A device and the libraries for it. `device` is "cpu", or "sm_90" for CUDA compute capability 9.0.

    `problem`: why there is no CUDA device. `library_problem`: why Transformer Engine cannot be used. `no_compiler`: why
    nothing can be compiled for it.
    """

    device: str
    compute_capability: tuple[int, int] | None = None
    cuda: tuple[int, int] | None = None
    library: str | None = None
    problem: str | None = None
    library_problem: str | None = None
    no_compiler: str | None = None

    @classmethod
    def none(cls, problem: str) -> "Capability":
        """Return the capability of a machine without a CUDA device; `problem`: why it has none."""
        library, library_problem = installed_library()
        return cls("cpu", library=library, problem=problem, library_problem=library_problem)

    @classmethod
    def of_gpu(cls, major: int, minor: int, cuda: tuple[int, int] = (13, 0), library: str = "2.20.2") -> "Capability":
        """Return the capability of a GPU with all libraries installed, as in the table of recipes and devices."""
        return cls(f"sm_{major}{minor}", (major, minor), cuda, library)


DEVICES = {
    each.device: each
    for each in (
        Capability("cpu", problem="no CUDA device"),
        *(Capability.of_gpu(major, minor) for major, minor in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))),
    )
}
"""The matrix's devices: CPU, A100 (8.0), L4 and L40 (8.9), H100 and H200 (9.0), B200 (10.0), RTX 5090 (12.0)."""
HARDWARE = {
    "cpu": DEVICES["cpu"],
    **dict.fromkeys(("a100",), DEVICES["sm_80"]),
    **dict.fromkeys(("l4", "l40", "l40s", "rtx4090"), DEVICES["sm_89"]),
    **dict.fromkeys(("h100", "h200", "gh200"), DEVICES["sm_90"]),
    **dict.fromkeys(("b200", "gb200"), DEVICES["sm_100"]),
    **dict.fromkeys(("rtx5090",), DEVICES["sm_120"]),
    # ROCm's torch calls gfx90a compute capability 9.0; Transformer Engine for CUDA does not run there.
    "mi250x": Capability("gfx90a", (9, 0), problem="gfx90a has no FP8 unit, and no CUDA"),
}
"""Devices of `hardware=NAME`, with CUDA and Transformer Engine installed (compute capabilities:
https://developer.nvidia.com/cuda-gpus)."""


def version_tuple(text: str) -> tuple[int, int]:
    """Return (major, minor) of a version: (2, 20) for "2.20.0.dev0"; (0, 0) unless it begins with two numbers."""
    parts = text.split(".")
    numbers = [part for part in parts[:2] if part.isdigit()]
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 else (0, 0)


def installed_library() -> tuple[str | None, str | None]:
    """Return (installed version or None, why it cannot be used or None) of Transformer Engine, without importing it."""
    wanted = f"at least {LIBRARY[0]}.{LIBRARY[1]} and below {LIBRARY[0] + 1}"
    try:
        found = version("transformer-engine")
    except PackageNotFoundError:
        return None, f"Transformer Engine ({wanted}) is not installed: pip install 'transformer-engine[pytorch]'"
    if LIBRARY <= version_tuple(found) < (LIBRARY[0] + 1, 0):
        return found, None
    return found, f"Transformer Engine {found} is installed, and {wanted} is needed"


def device_here(accelerator: str) -> Capability:
    """Return the device that `trainer.accelerator` (auto, cpu, cuda) finds on this machine, without its libraries."""
    if accelerator == "cpu":
        return Capability.none("trainer.accelerator=cpu")
    if not has_nvidia_driver():
        return Capability.none("no CUDA device: there is no NVIDIA driver")
    import torch

    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        return Capability.none(f"no CUDA device: torch {torch.__version__}, {built}, finds none")
    major, minor = torch.cuda.get_device_capability()
    from lightning_llm.precision.cast.inductor import no_compiler

    cuda = version_tuple(torch.version.cuda or "")
    return Capability(f"sm_{major}{minor}", (major, minor), cuda, no_compiler=no_compiler("cuda"))


@functools.cache
def capability_here(accelerator: str) -> Capability:
    """Return this machine's device with its libraries, which are imported if there is a GPU; cached per process."""
    device = device_here(accelerator)
    if device.compute_capability is None:
        return device
    library, problem = installed_library()
    if problem is None:
        from lightning_llm.precision.native.transformer_engine import import_problem

        problem = import_problem()
    return replace(device, library=library, library_problem=problem)


Runs = Literal["native", "emulated", "refused"]


def device_problems(native: NativeRecipe, here: Capability) -> list[str]:
    """Return the requirements of `native` that `here` does not meet (Transformer Engine 2.20, `check_*_support`)."""
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
    """Return known faults of NVFP4's kernels beyond compute capability 10.x, "Partial" in NVIDIA's support matrix.

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


def size_problems(native: NativeRecipe, widths: Mapping[str, int]) -> list[Problem]:
    """Return a problem for each of `widths` ({key: size of a linear}) that the kernels of `native` reject."""
    multiple = MULTIPLES[native.kind]
    return [
        Problem(key, f"is {width}, not a multiple of {multiple}, as {native.name} requires.")
        for key, width in widths.items()
        if width % multiple
    ]


def shared_problems(native: NativeRecipe, shared: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each of `shared` ({key: degree} of tp and cp) under which kernels cast unlike the recipe.

    Ranks of `tp` and `cp` cast their parts of X, W and dY. This equals the recipe's cast of the whole if scales belong
    to blocks, which are never split (`plan/divisibility.py`); if they are delayed, because all ranks' amaxes go into
    one history; and otherwise because the quantizers take the maximum of the ranks' amaxes, or that of the part where
    `amax_scope` is shard. A quantizer casts a tensor for both of its GEMMs with one of the two.
    """
    if not native.whole_tensors or None not in native.scopes:
        return []
    tensor = ("X", "W", "dY")[native.scopes.index(None)]
    why = f"the two casts of {tensor} have different amax_scope, while {native.name} has one for both"
    return [Problem(key, f"must be 1, because {why}.", degree) for key, degree in shared.items()]


@dataclass(frozen=True)
class Decision:
    """Decision on a recipe's quantized GEMMs on a machine: how they run (`runs`), why not natively (`problems`).

    `software`: why unquantized GEMMs are emulated as well, None if they are not.
    """

    runs: Runs
    natives: tuple[NativeRecipe, ...] = ()
    problems: tuple[Problem, ...] = ()
    library: str | None = None
    software: str | None = None

    def facts(self) -> dict[str, str]:
        """Return {"runs", "reason"} as plain data."""
        return {"runs": self.runs, "reason": self.reason}

    def refusals(self) -> list[Problem]:
        """Return the problems to report for `precision.backend=native` if it is impossible; empty otherwise."""
        if self.runs != "refused":
            return []
        return [
            Problem(each.key, f"{each.text}. Set auto or emulated.", "native")
            if each.key == "precision.backend"
            else replace(each, text=f"{each.text.rstrip('.')}; so precision.backend=native is not possible. Set auto.")
            for each in self.problems
        ]

    @property
    def reason(self) -> str:
        """Reason of the decision in one line."""
        if self.runs == "native":
            names = dict.fromkeys(native.name for native in self.natives)
            return f"Transformer Engine {self.library}, {' and '.join(names)}" if names else "not quantized"
        return "; ".join(dict.fromkeys(_sentence(problem) for problem in self.problems))


def _sentence(problem: Problem) -> str:
    text = problem.text.rstrip(".")
    if problem.key == "precision.backend":
        return text
    return f"{problem.key} {text}" if problem.value is None else f"{problem.key}={problem.value}: {text}"


def decide(
    recipe: PrecisionConfig,
    here: Capability,
    widths: Mapping[str, int] | None = None,
    shared: Mapping[str, str] | None = None,
) -> Decision:
    """Return how `recipe` runs on `here` for a model with linears of `widths` (sizes by key; None: sizes that fit).

    `shared`: the degrees above 1 of tensor and context parallelism, by key. A recipe with different casts per layer is
    native only if all of them are. With `precision.backend=native`, "emulated" becomes "refused".
    """
    if recipe.compute_dtype == "fp16" and here.compute_capability is None:
        software = "on a CPU fp16 is a format, and GEMMs run in fp32"
        in_bf16 = recipe.model_copy(update={"compute_dtype": "bf16"})
        decision = decide(in_bf16, here, widths, shared) if recipe.quantizes else Decision("emulated")
        why = decision.problems or (Problem("precision.backend", software),)
        return replace(decision, problems=why, software=software)
    if not recipe.quantizes:
        return Decision("native")
    found, differences = native_recipes(recipe)
    natives, problems = tuple(dict.fromkeys(found.values())), list(differences)
    for native in natives:
        problems += size_problems(native, widths or {})
        problems += shared_problems(native, shared or {})
        problems += [Problem("precision.backend", text) for text in device_problems(native, here)]
    problems = list(dict.fromkeys(problems))
    if recipe.backend == "emulated":
        return Decision("emulated", problems=(Problem("precision.backend", "precision.backend=emulated asks for it"),))
    if recipe.backend == "native" and problems:
        return Decision("refused", (), tuple(problems))
    if here.compute_capability is None:  # without a GPU other problems do not matter
        return Decision("emulated", problems=(Problem("precision.backend", here.problem or "no CUDA device"),))
    return Decision("emulated", (), tuple(problems)) if problems else Decision("native", natives, library=here.library)


Matrix = dict[str, dict[str, Decision]]
"""{recipe: {device: decision}}."""


def shipped_recipes() -> list[PrecisionConfig]:
    """Return the recipes of `conf/precision`, sorted by name."""
    files = list(resources.files("lightning_llm.conf").joinpath("precision").iterdir())
    texts = [file.read_text(encoding="utf-8") for file in files if file.name.endswith(".yaml")]
    recipes = [PrecisionConfig.model_validate(yaml.safe_load(text)) for text in texts]
    return sorted(recipes, key=lambda recipe: recipe.name)


def decision_matrix(
    recipes: Iterable[PrecisionConfig], widths: Mapping[str, int] | None = None, here: Capability | None = None
) -> Matrix:
    """Return the decision for every recipe on every kind of device (`DEVICES`), under `precision.backend=auto`.

    Args:
        recipes: the rows.
        widths: sizes of a model's linears, as in `decide`.
        here: adds a column "here" for this machine.
    """
    devices = {**DEVICES, **({"here": here} if here else {})}
    automatic = [recipe.model_copy(update={"backend": "auto"}) for recipe in recipes]
    return {
        recipe.name: {name: decide(recipe, device, widths) for name, device in devices.items()} for recipe in automatic
    }
