"""Generated tables of measurements: rows of gpu-check, of `make bench ARGS=plan_time`, and of the simulations."""

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.results import newest  # noqa: E402

GPU_ROWS = ROOT / "benchmarks" / "results" / "2026-11-26-nvidia-h200.jsonl"
SIMULATED = Path(__file__).parent / "simulated.json"
LAYERS = {"o_proj": "4096 x 4096", "up_proj": "4096 x 14336", "down_proj": "14336 x 4096"}


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table; columns after the first are aligned to the right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def gpu_rows() -> dict[str, dict[str, Any]]:
    """Return {what was measured: its newest row with a value}."""
    rows = map(json.loads, GPU_ROWS.read_text(encoding="utf-8").splitlines())
    return {row["what"]: row for row in rows if row.get("value") is not None}


AGREEMENT = {
    "equal codes of the six operands, native against emulated": r"\S+ \S+: equal codes",
    "equal scales of the six operands": r"\S+ \S+: equal scales",
    "equal scales and histories of delayed scaling after three steps": r"\S+: equal \w+ after three steps",
    "y, dx, dw, native over emulated: relative difference": r"\S+ (y|dx|dw): native over emulated, .*",
    "dw in fp32 (`precision.wgrad_dtype=fp32`): relative difference": r"\S+ dw in fp32: native over emulated, .*",
    "compiled casts (Triton) equal to eager ones": r"\S+: compiled casts equal to eager ones",
}
"""Title of a row -> pattern of the measurements in it."""


def gpu_agreement() -> str:
    """Return how many rows each check has, with the least and greatest value."""
    lines = []
    for title, pattern in AGREEMENT.items():
        found = [row for what, row in gpu_rows().items() if re.fullmatch(pattern, what)]
        ends = [_with_unit(pick(row["value"] for row in found), found[0]["unit"]) for pick in (min, max)]
        lines.append([title, str(len(found)), *ends])
    losses = {what: row["value"] for what, row in gpu_rows().items() if what.startswith("loss after 3 steps")}
    off = {what: 100 * abs(loss / losses["loss after 3 steps, bf16"] - 1) for what, loss in losses.items()}
    last = max(off, key=lambda what: off[what])
    without = max(value for what, value in off.items() if what != last)
    title = (
        f"loss after three training steps: distance from bf16's (without {last.rpartition(' ')[2]}: {without:.2g} %)"
    )
    lines.append([title, str(len(off)), *(_with_unit(pick(off.values()), "%") for pick in (min, max))])
    return table(["check", "measured", "least", "most"], lines)


def _with_unit(value: float, unit: str) -> str:
    return f"{value:.3g} %" if unit == "%" else f"{value:.2g}"


def gpu_speed() -> str:
    """Return tokens per second and utilization of a 1B model in `train` and in loops written by hand."""
    rows = gpu_rows()
    names = {
        "train": "`lightning-llm train precision=bf16`",
        "hand-written loop": "a Llama and a loop written by hand in plain PyTorch, compiled",
        "our model in a loop": "our model in a hand-written loop",
    }
    speeds = {title: rows[f"llama_1b, bf16, {name}"]["value"] for name, title in names.items()}
    cudnn = rows["llama_1b, bf16, trainer.attention_kernel=cudnn: tokens/s over torch's choice"]
    speeds["the same with `trainer.attention_kernel=cudnn`"] = float(cudnn["note"].split()[0])
    use = rows["llama_1b, bf16: model FLOPs utilisation of train"]["value"] / speeds[names["train"]]
    lines = [[title, f"{speed:,.0f}", f"{use * speed:.1f} %"] for title, speed in speeds.items()]
    return table(["", "tokens/s", "utilization"], lines)


def gpu_layers() -> str:
    """Return the time of compiled bf16 over a native recipe's, for each linear layer."""
    found: dict[str, dict[str, float]] = {}
    for what, row in gpu_rows().items():
        if match := re.fullmatch(r"(\w+) .*, (\w+), native: bf16's time over it", what):
            found.setdefault(match[2], {})[match[1]] = row["value"]
    lines = [[f"`{name}`", *(f"{times[layer]:.2f}" for layer in LAYERS)] for name, times in found.items()]
    return table(["recipe", *LAYERS.values()], lines)


def gpu_emulation() -> str:
    """Return the time of three linear layers with emulated casts over that of compiled bf16."""
    rows = {what: row["value"] for what, row in gpu_rows().items()}
    found = {what.split(", ")[1]: value for what, value in rows.items() if what.endswith("emulated: time over bf16's")}
    return table(["recipe", "time over bf16's"], [[f"`{name}`", f"{value:.2f}"] for name, value in found.items()])


def benchmark(name: str) -> dict[str, tuple[float, str]]:
    """Return {row: (value, text)} of the newest result file of a benchmark."""
    result = newest(name)
    if result is None:
        raise ValueError(f"benchmarks/results has no file of {name}. Run make bench ARGS={name}")
    return {what: (value, text) for what, value, text in result.rows}


def published_rates() -> str:
    """Return published over predicted speed of every run."""
    rows = []
    for what, (value, text) in benchmark("plan_time").items():
        if text.startswith("published "):
            published, predicted, unit = re.fullmatch(r"published (\S+), predicted (\S+) (.*)", text).groups()
            run = what.removesuffix(", published over predicted").replace(", 1:", ":", 1)
            rows.append([run, *map(_plain, (published, predicted)), unit, f"{value:.2f}"])
    return table(["run", "published", "predicted", "unit", "ratio"], rows)


def _plain(number: str) -> str:
    """Return "1.258e+04" as "12,580"."""
    value = float(number.replace(",", ""))
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def published_errors() -> str:
    """Return rank correlation, median ratio and median error of each group of runs."""
    found: dict[str, dict[str, str]] = {}
    for what, (value, text) in benchmark("plan_time").items():
        group, _, figure = what.partition(": ")
        for start in ("rank correlation", "median of", "median error"):
            if figure.startswith(start):
                found.setdefault(group, {})[start] = f"{value:.0f} %" if figure.endswith("%") else f"{value:.2f}"
                found[group].update({"rows": text.split()[0]} if start == "median of" else {})
    header = ["runs", "number", "rank correlation of FLOP/s per device", "median ratio", "median error of the rate"]
    keys = ("rows", "rank correlation", "median of", "median error")
    return table(header, [[name, *(figures.get(key, "") for key in keys)] for name, figures in found.items()])


def simulated(name: str) -> str:
    """Return a simulated table as its script wrote it."""
    return "\n".join([*json.loads(SIMULATED.read_text(encoding="utf-8"))[name], ""])


SECTIONS: dict[str, Callable[[], str]] = {
    "gpu-agreement": gpu_agreement,
    "gpu-speed": gpu_speed,
    "gpu-layers": gpu_layers,
    "gpu-emulation": gpu_emulation,
    "published-rates": published_rates,
    "published-errors": published_errors,
    **{f"simulated-{name}": partial(simulated, name) for name in json.loads(SIMULATED.read_text(encoding="utf-8"))},
}
