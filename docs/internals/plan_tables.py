"""Generated tables of docs/reference: layouts, plans against published memory and speed, known issues."""

import re
import sys
import textwrap
from collections.abc import Callable
from inspect import getdoc
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmarks.plan_memory import table as published_memory  # noqa: E402
from lightning_llm.base.errors import Problem  # noqa: E402
from lightning_llm.config.schema import ParallelConfig  # noqa: E402
from lightning_llm.config.schema.precision import PrecisionConfig  # noqa: E402
from lightning_llm.plan.check import layout_rule_problems  # noqa: E402
from lightning_llm.plan.report import RULES  # noqa: E402
from lightning_llm.plan.resolve import DerivedConfig  # noqa: E402
from lightning_llm.plan.time.describe import RATIOS  # noqa: E402
from lightning_llm.precision.native.decide import DEVICES  # noqa: E402

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def layouts() -> str:
    """Return the table of `conf/parallel/*.yaml`: the comment at the top, the ZeRO stage and the degrees."""
    lines = ["| `parallel=` | | `zero_stage` | degrees |", "|---|---|---|---|"]
    files = [(file.read_text(encoding="utf-8"), file) for file in (ROOT / "conf" / "parallel").glob("*.yaml")]
    parsed = [(yaml.safe_load(text), text) for text, _ in files]
    order = ("pp", "cp", "tp", "dp_replicate", "dp_shard")
    for keys, text in sorted(parsed, key=lambda each: (*(axis in each[0] for axis in order), each[0]["name"])):
        comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
        comment = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", comment)
        degrees = ", ".join(
            f"`{axis}` = {'the rest' if keys[axis] is None else keys[axis]}" for axis in AXES if axis in keys
        )
        lines.append(f"| `{keys['name']}` | {comment} | {keys.get('zero_stage', 0)} | {degrees or 'all 1'} |")
    return "\n".join(lines) + "\n"


def published_speed() -> str:
    """Return the table of published over predicted speed by family of layouts."""
    lines = ["| family | runs | published over predicted | median |", "|---|---:|---|---:|"]
    for ratio in RATIOS.values():
        measured = f"{ratio.low:.2f} to {ratio.high:.2f} | {ratio.median:.2f}" if ratio.runs else "none | "
        lines.append(f"| {ratio.family} | {ratio.runs} | {measured} |")
    return "\n".join(lines) + "\n"


def known_issues() -> str:
    """Return the settings of a machine that `plan` warns of, each with its source, from the docstrings of the rules."""
    lines = ["| setting | source |", "| --- | --- |"]
    for rule in RULES:
        setting, _, source = (getdoc(rule) or "").partition("\n\nSource: ")
        lines.append(f"| {setting.removesuffix('.')} | {' '.join(source.split()).removesuffix('.')} |")
    return "\n".join(lines) + "\n"


NATIVE = {  # an example of each native configuration, and a device that has it
    "fp8_current": "sm_90",
    "fp8_delayed": "sm_90",
    "fp8_delayed_micro_batch": "sm_90",
    "fp8_subchannel": "sm_90",
    "mxfp8": "sm_100",
    "nvfp4": "sm_100",
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "`ddp`": ("ddp", {}),
    "`zero3`": ("zero3", {}),
    "`tp`": ("tp", {}),
    "`cp`": ("cp", {}),
    "`pp`": ("pp", {}),
    "`fsdp_cp_tp`": ("fsdp_cp_tp", {}),
    "`zero3`, `parameter_gather`": ("zero3", {"parameter_gather": "quantised"}),
    "`ddp`, `keep_weight_casts`": ("ddp", {"keep_weight_casts": True}),
    "`zero2`, `keep_weight_casts`": ("zero2", {"keep_weight_casts": True}),
}
"""Columns of `native_layouts`: a layout, and keys of `precision`."""


def native_layouts() -> str:
    """Return the table of native recipes and layouts on 8 ranks, with the reasons for combinations that are rejected.

    Each cell is the decision and the checks of a config with `precision.backend=native`.
    """
    from lightning_llm.config.compose import compose_config

    words = ["model=llama_8b", "data.sequence_length=8192", "world=8", "data.micro_batch_size=1"]
    base = compose_config([*words, "data.global_batch_size=64"])
    lines, reasons = [f"| recipe | {' | '.join(LAYOUTS)} |", "|---" * (1 + len(LAYOUTS)) + "|"], dict[str, int]()
    for name, device in NATIVE.items():
        recipe = yaml.safe_load((ROOT / "conf" / "precision" / f"{name}.yaml").read_text(encoding="utf-8"))
        cells = []
        for layout, keys in LAYOUTS.values():
            precision = PrecisionConfig.model_validate(recipe | keys | {"backend": "native"})
            parallel = yaml.safe_load((ROOT / "conf" / "parallel" / f"{layout}.yaml").read_text(encoding="utf-8"))
            parallel = ParallelConfig.model_validate(parallel | {"compile": False})
            config = base.model_copy(update={"precision": precision, "parallel": parallel})
            problems = layout_rule_problems(DerivedConfig(config, DEVICES[device]))
            found = [str(reasons.setdefault(_reason(each), len(reasons) + 1)) for each in problems]
            cells.append(f"rejected ({', '.join(found)})" if found else "native")
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    listed = [textwrap.fill(f"{number}. {text}", 140, subsequent_indent="   ") for text, number in reasons.items()]
    return "\n".join([*lines, "", *listed]) + "\n"


def _reason(problem: Problem) -> str:
    return f"`{problem.key}` {problem.text.split('. ')[0].removesuffix('.')}"


SECTIONS: dict[str, Callable[[], str]] = {
    "layouts": layouts,
    "native-layouts": native_layouts,
    "published-memory": published_memory,
    "published-speed": published_speed,
    "known-issues": known_issues,
}
