"""Native casts of parts of tensors on two ranks: over gloo on one GPU, over NCCL on two.

`python -m gpu_check.parts RECIPE BACKEND RANK FILE` is one rank, which meets the other through FILE.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

from gpu_check import setting
from gpu_check.checks import Call
from gpu_check.journal import OutOfTimeError, Row, judged, missing
from gpu_check.layers import relative
from gpu_check.setting import recipes
from lightning_llm.base.errors import ConfigError
from lightning_llm.config.schema import ParallelConfig
from lightning_llm.config.schema.precision import PrecisionConfig, slots_of
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.operand_shards import shared_parts
from lightning_llm.parallel.process_group import gather_objects
from lightning_llm.plan.degrees import resolve_degrees
from lightning_llm.precision.linear.module import QuantizedLinear
from lightning_llm.precision.linear.plan import KEY_COUNT, LinearPlan
from lightning_llm.precision.native.codes import SIZE, Shards, check_native_casts, sample
from lightning_llm.precision.native.transformer_engine import NativeLinear

RANKS = 2
LAYOUTS = ("tp", "cp")
PRODUCT_LIMIT = 5e-3
"""As `agreement.PRODUCT_LIMIT`. A wrong scale of a part changes a product by some percent."""


def on_ranks(recipe: PrecisionConfig, call: Call) -> Iterator[Row]:
    """Yield for each layout, over gloo and over NCCL, whether casts and products of parts are the recipe's."""
    gpus = torch.cuda.device_count()
    for backend in ("gloo", "nccl"):
        what = f"{recipe.name}: parts on {RANKS} ranks over {backend}"
        if backend == "nccl" and gpus < RANKS:
            yield missing(what, f"this machine has {gpus} GPU(s), and NCCL needs one for each rank")
        elif backend == "gloo" and any(cast.scale == "two_level_e4m3" for cast in slots_of(recipe).values()):
            yield missing(what, "gloo does not reduce several CUDA tensors at once, as NVFP4's quantizer does")
        else:
            yield from _rows(recipe, backend, _started(recipe.name, backend, call))


def _started(recipe: str, backend: str, call: Call) -> list[dict[str, Any]]:
    """Run the ranks as processes and return the findings of rank 0. Raises RuntimeError if a rank failed."""
    file = call.scratch / f"parts-{recipe}-{backend}"
    command = [sys.executable, "-m", "gpu_check.parts", recipe, backend]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(rank), str(file)], **pipes) for rank in range(RANKS)]  # type: ignore[call-overload]
    ends = time.monotonic() + max(1.0, call.clock.left - 2)
    try:
        said = [process.communicate(timeout=max(0.1, ends - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        raise OutOfTimeError("the ranks had not ended") from None
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, said, strict=True):
        if process.returncode:
            raise RuntimeError((errors.strip().splitlines() or ["a rank failed"])[-1])
    found: list[dict[str, Any]] = json.loads(said[0][0].strip().splitlines()[-1])
    return found


def _rows(recipe: PrecisionConfig, backend: str, found: list[dict[str, Any]]) -> Iterator[Row]:
    for each in found:
        what = f"{recipe.name} under {each['layout']}={RANKS} over {backend}"
        yield judged(f"{what}: casts of parts", float(not each["problems"]), "", not each["problems"],
                     "; ".join(each["problems"])[:300] or "no difference")  # fmt: skip
        for name, difference in each["differences"].items():
            yield judged(f"{what}: {name}, native over emulated, relative difference", difference, "",
                         difference < PRODUCT_LIMIT, f"< {PRODUCT_LIMIT}")  # fmt: skip


def findings(recipe: PrecisionConfig, device: torch.device, mesh_device: torch.device) -> list[dict[str, Any]]:
    """Return the problems of casts and the largest differences of products, of all ranks, by layout. Collective."""
    made = []
    for name in LAYOUTS:
        text = resources.files("lightning_llm.conf").joinpath("parallel", f"{name}.yaml").read_text(encoding="utf-8")
        config = ParallelConfig.model_validate(yaml.safe_load(text) | {"compile": False})
        parts = shared_parts(Layout.from_config(config, resolve_degrees(config, RANKS), mesh_device))
        problems = list[str]()
        for bias in (False, True):
            for each in gather_objects(_problems(recipe, device, bias, parts)):
                problems += each
        differences = dict[str, float]()
        for part in parts:
            for one in gather_objects(_differences(recipe, device, part)):
                differences |= {key: max(value, differences.get(key, 0.0)) for key, value in one.items()}
        made.append({"layout": name, "problems": problems, "differences": differences})
    return made


def _problems(recipe: PrecisionConfig, device: torch.device, bias: bool, parts: list[dict[str, Any]]) -> list[str]:
    try:
        unchecked = check_native_casts(recipe, device, bias, parts)
    except ConfigError as error:
        return [each.text for each in error.problems]
    return [] if unchecked is None else [unchecked]


def _differences(recipe: PrecisionConfig, device: torch.device, shards: Shards) -> dict[str, float]:
    """Return the relative differences of y, dx and dw of this rank's parts; stochastic gradients are left out."""
    native, emulated = (_products(kind, recipe, device, shards) for kind in (NativeLinear, QuantizedLinear))
    stochastic = any(cast.stochastic for cast in slots_of(recipe).values())
    names = ("y",) if stochastic else ("y", "dx", "dw")
    return {name: relative(native[name], emulated[name]) for name in names}


def _products(
    kind: type[QuantizedLinear], recipe: PrecisionConfig, device: torch.device, shards: Shards
) -> dict[str, Tensor]:
    linear = nn.Linear(SIZE, SIZE, bias=False, device=device)
    layer = kind("parts", linear, LinearPlan(slots_of(recipe), "eager", shards))
    layer.keys = torch.arange(KEY_COUNT)
    # Amaxes of parts differ by a factor of 3, so that the scale of a part alone would round other numbers.
    x, w, dy = (sample(device, torch.bfloat16, 40) * 3.0 ** shards[role].part for role in ("x", "w", "dy"))
    with torch.no_grad():
        layer.weight.copy_(w)
    x.requires_grad_()
    y = layer(x)
    y.backward(dy)
    if x.grad is None or layer.weight.grad is None:
        raise RuntimeError("a gradient is missing")
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}


def main(recipe: str, backend: str, rank: str, file: str) -> None:
    """Run one of two ranks; rank 0 prints the findings as JSON."""
    number = int(rank)
    device = torch.device(setting.DEVICE, number if backend == "nccl" else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting = f"file://{Path(file).absolute()}"
    dist.init_process_group(backend, init_method=meeting, rank=number, world_size=RANKS, timeout=timedelta(seconds=60))
    found = findings(recipes()[recipe], device, device if backend == "nccl" else torch.device("cpu"))
    dist.destroy_process_group()
    if number == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
