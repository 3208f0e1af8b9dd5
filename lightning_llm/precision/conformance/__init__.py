"""Recorded vectors of Transformer Engine, microxcaling, Quartet (I, II), Megatron and torch against the emulation.

A folder holds `manifest.json` with `cases`, and the .npz files they name; array `a` of case `c` is stored as `c__a`. A
check is one recorded array that is not an input, or one recorded hash; a case passes if it has checks and all agree.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.terminal import Waiting
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.conformance import checks
from lightning_llm.precision.conformance.case import Case, Check, Runner

_GIVEN = "x X W dY u N rbits8 amax_seq found_inf sr_signs sr_u sign_dgrad sign_wgrad u_dy u_wT u_dyT u_xT"
INPUTS = frozenset(_GIVEN.split())
"""Recorded arrays that are inputs in every case."""


@dataclass(frozen=True)
class Verdict:
    """Result of one case: number of checks made, and the errors of those that failed."""

    recipe: str
    case: str
    checks: int
    errors: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every recorded array was checked and agrees."""
        return self.checks > 0 and not self.errors


def run_conformance(folder: str | Path, compiled: bool) -> list[Verdict]:
    """Check all recorded cases in `folder`, eagerly or `compiled` by Inductor; return a verdict per case.

    A case of an unknown recipe, or with a recorded array that no check covers, fails with that reason. Raises
    ConfigError if the folder has no readable vectors, or there is no compiler.
    """
    folder = Path(folder)
    manifest = _manifest(folder)
    if compiled and (reason := inductor.why_not("cpu")) is not None:
        raise ConfigError(
            Problem("conformance", f"compiled checks require a C++ compiler: {reason}. Use --eager to run without one.")
        )
    runner, files = Runner(compiled), _Files(folder)
    cases = [Case(spec, files.arrays(spec), runner) for spec in manifest]
    shared = {case.spec["file"]: case for case in cases if set(case.spec["arrays"]) <= INPUTS}
    verdicts = []
    with Waiting(f"vectors checked, {'compiled' if compiled else 'eager'}", of=len(cases)) as waiting:
        for number, case in enumerate(cases):
            waiting.tell(number)  # compiling a case takes seconds the first time
            verdicts.append(_verdict(case, shared))
    return verdicts


def _manifest(folder: Path) -> list[dict[str, Any]]:
    try:
        cases = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["cases"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            Problem(str(folder), f"contains no vectors: expected a manifest.json with a list 'cases' ({error}).")
        ) from error
    return list(cases)


class _Files:
    """The .npz files of a folder, each opened once."""

    def __init__(self, folder: Path):
        self.folder, self.loaded = folder, dict[str, dict[str, np.ndarray[Any, Any]]]()

    def arrays(self, spec: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays that `spec` lists. Raises ConfigError where one is missing."""
        if spec["file"] not in self.loaded:
            try:
                with np.load(self.folder / spec["file"]) as file:
                    self.loaded[spec["file"]] = dict(file)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    Problem(str(self.folder / spec["file"]), f"cannot be read: {error}. Record it again.")
                ) from error
        file_arrays = self.loaded[spec["file"]]
        missing = [name for name in spec["arrays"] if f"{spec['name']}__{name}" not in file_arrays]
        if missing:
            raise ConfigError(
                Problem(str(self.folder / spec["file"]), f"lacks {missing} of case {spec['name']}. Record it again.")
            )
        return {name: file_arrays[f"{spec['name']}__{name}"] for name in spec["arrays"]}


def _checker(case: Case) -> Callable[[Case], Iterator[Check]] | None:
    """Return the checks of a case, chosen by its recipe and, for recipes with several kinds, by its arrays."""
    by_recipe: dict[str, Callable[[Case], Iterator[Check]]] = {
        "element cast": checks.element_cast,
        "scale cast": checks.scale_cast,
        "scale_from_amax": checks.scale_from_amax,
        "fp8_current": checks.current,
        "fp8_subchannel": checks.blocks,
        "mxfp8": checks.mxfp8,
        "MX (OCP floor scale)": checks.mx_ocp,
        "nvfp4": checks.nvfp4_gemm if "Y" in case else checks.nvfp4,
        "nvfp4 4over6": checks.four_over_six,
        "nvfp4 SR": checks.nvfp4_stochastic,
        "mxfp4_sr": checks.mxfp4_backward if "dX" in case else checks.mxfp4_stochastic,
        "mxfp4_sr_rht": checks.mxfp4_backward,
        "quartet": checks.quartet,
        "quartet_ii": checks.recorded_cast,
        "tetrajet_v2": checks.recorded_cast,
        "fp8_delayed": checks.delayed_updates if "hist" in case else checks.delayed_cast,
        "fp16": checks.loss_scales,
    }
    return by_recipe.get(case.spec["recipe"])


def _verdict(case: Case, shared: dict[str, Case]) -> Verdict:
    """Run a case's checks, and require one for every recorded array that is not an input."""
    recipe, inputs = case.spec["recipe"], shared.get(case.spec["file"])
    if case is inputs:
        found = list(checks.six_slot_inputs(case))
    elif "sha256_dequant_fp32_plus0" in case.spec and recipe in checks.SIX_SLOTS:
        if inputs is None:
            return Verdict(recipe, case.name, 0, ("no case of its file holds X, W and dY",))
        found = list(checks.six_slots(case, {name: inputs.tensor(name) for name in ("X", "W", "dY")}))
    else:
        checker = _checker(case)
        if checker is None:
            return Verdict(recipe, case.name, 0, (f"no check for recipe '{recipe}'",))
        found = list(checker(case))
    # Some arrays are an input in one case and a result in another.
    given = INPUTS | ({"amax"} if recipe == "scale_from_amax" or "expected" in case else set())
    given |= {"scale"} if recipe == "fp8_delayed" and "codes" in case else set()
    unchecked = set(case.spec["arrays"]) - given - {check.array for check in found}
    errors = [f"{check.array}: {check.error}" for check in found if check.error is not None]
    errors += [f"{array}: not covered by any check" for array in sorted(unchecked)]
    return Verdict(recipe, case.name, len(found), tuple(errors))
