"""The plan of one run as data and as lines: what `plan` prints, and the first line of `train`. Imports no torch."""

import os
from typing import Any

from lightning_llm.config.redact import with_credentials
from lightning_llm.config.schema.model import DEFAULT_LAYERS
from lightning_llm.data.report import planned_phases
from lightning_llm.model.flops import count_parameters, flops_per_token
from lightning_llm.model.structure import linear_names
from lightning_llm.plan.checkpoints import disk_facts, disk_notes, disk_row
from lightning_llm.plan.known_bad import known_bad
from lightning_llm.plan.memory.accounting import OURS, Accounting
from lightning_llm.plan.memory.fit import hardware_facts, hardware_row
from lightning_llm.plan.nodes import reduction_note
from lightning_llm.plan.origin import origin_facts, origin_rows
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.step_law import law_notes, law_row
from lightning_llm.plan.teachers import teacher_flops_per_token
from lightning_llm.plan.text.describe import cost_facts, layout_facts, layout_rows, memory_rows, sent_rows, traffic_row
from lightning_llm.plan.time.describe import time_facts, time_rows
from lightning_llm.precision.native.capability import HARDWARE
from lightning_llm.precision.recipe.describe import precision_facts, precision_rows
from lightning_llm.precision.recipe.module_rules import Coverage


def plan_facts(plan: Plan, accounting: Accounting = OURS) -> dict[str, Any]:
    """Return the plan as plain data: choices, `parameters`, `layers` (a pattern), `flops_per_token`, bytes by kind.

    `memory_bytes` are those a rank holds, by `accounting`, and `memory_peak` those of its peak; `bytes_sent` those it
    sends in a step, `traffic_bytes` where those go; `hardware` is `fit.hardware_facts`, `disk` is
    `checkpoints.disk_facts`. `step_seconds` and `time` are `time.describe.time_facts`, None without a cluster.
    """
    config = plan.config
    tokens = config.data.global_batch_size * config.data.sequence_length
    layout = layout_facts(plan)
    return {
        "model": config.model.name,
        "parameters": count_parameters(config.model).total,
        "layers": list(config.model.layers or DEFAULT_LAYERS),
        "layout": layout,
        "precision": precision_facts(
            config.precision, plan.decision, linear_names(config.model), config.model.num_layers
        ),
        "data": config.data.name,
        "phases": planned_phases(config.data, config.trainer.max_steps),
        "step_tokens": tokens,
        "accumulation": layout["micro_batches_per_rank"],
        "total_tokens": tokens * config.trainer.max_steps,
        "max_steps": config.trainer.max_steps,
        "flops_per_token": flops_per_token(config.model, config.data.sequence_length),
        "teacher_flops_per_token": teacher_flops_per_token(config),
        **origin_facts(config),
        **cost_facts(plan, accounting),
        **time_facts(plan),
        "hardware": hardware_facts(plan, accounting),
        "disk": disk_facts(config),
        "step_law": config.step_law.as_data() if config.step_law else None,
        "config_hash": plan.identity,
        "run_dir": config.run.dir,
    }


def plan_line(plan: Plan, device: str) -> str:
    """Return the one line that `train` prints before it starts; `device` in words."""
    facts = plan_facts(plan)
    layout = facts["layout"]
    ranks = f" on {layout['world']} ranks" if layout["world"] > 1 else ""
    parts = [
        f"{facts['model']} {_count(facts['parameters'])} parameters",
        f"{layout['name']}{ranks}{' compiled' if layout['compile'] else ''}",
        _precision(facts["precision"]),
        f"{facts['data']}",
        f"{facts['step_tokens']:,} tokens/step x {facts['max_steps']:,} steps",
        device,
    ]
    return "plan   " + " | ".join(parts)


def notes(plan: Plan, *, to_train: bool) -> list[str]:
    """Return what is allowed and may still surprise, one line each. `to_train`: the run starts, here and now."""
    config = plan.config
    schedule, steps = config.schedule, config.trainer.max_steps
    found = []
    if (uri := config.logger.tracking_uri) and with_credentials(uri) != uri:
        found.append(
            "note   the password in logger.tracking_uri is written nowhere: to go on later, give that key again, or "
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    if schedule.warmup_steps >= steps:
        found.append(
            f"note   schedule.warmup_steps={schedule.warmup_steps} is no shorter than trainer.max_steps={steps}: the "
            "learning rate is still rising when the run ends"
        )
    if (reduction := reduction_note(config, plan.degrees)) is not None:
        found.append(reduction)
    found += law_notes(config.step_law)
    if (judged := _hardware_note(plan, to_train)) is not None:
        found.append(judged)
    return [*found, *known_bad(plan, os.environ), *(disk_notes(config) if to_train else ())]


def _hardware_note(plan: Plan, to_train: bool) -> str | None:
    """Return which device native casts were judged by, where that is not the one the run is meant for."""
    config, here = plan.config, plan.capability.device
    if not config.precision.quantises:
        return None
    if to_train:  # on the device that was looked at
        if config.hardware is None or here == HARDWARE[config.hardware].device:
            return None
        return f"note   hardware={config.hardware} is for `plan`: casts run as this machine's device ({here}) allows"
    if config.planned_hardware is None and plan.degrees.world > config.trainer.devices:
        return (
            f"note   native or emulated is judged by this machine ({here}); hardware=h100 (or a100, b200, ...) judges "
            "by the device that the ranks are planned on"
        )
    return None


def render(facts: dict[str, Any]) -> str:
    """Return `plan_facts` as lines for a terminal."""
    rows = [
        ("model", f"{facts['model']}, {facts['parameters']:,} parameters{_pattern(facts['layers'])}"),
        *origin_rows(facts),
        *layout_rows(facts["layout"]),
        *precision_rows(facts["precision"]),
        (
            "data",
            f"{facts['data']}, {facts['step_tokens']:,} tokens/step, micro-batches per rank: {facts['accumulation']}",
        ),
        *(("phase", _phase(each)) for each in facts["phases"]),
        ("length", f"{facts['max_steps']:,} steps, {facts['total_tokens']:,} tokens"),
        (
            "FLOPs",
            f"{facts['flops_per_token']:.4g} per token, {facts['flops_per_token'] * facts['total_tokens']:.4g} in all",
        ),
        *_teacher_rows(facts),
        hardware_row(facts["hardware"]),
        *memory_rows(facts),
        *sent_rows(facts),
        *([traffic_row(facts)] if facts["layout"]["world"] > 1 else []),
        *time_rows(facts),
        disk_row(facts["disk"]),
        *([law_row(facts["step_law"])] if facts["step_law"] else []),
        ("identity", facts["config_hash"]),
        ("folder", facts["run_dir"]),
    ]
    width = max(17, *(len(name) for name, _ in rows))
    return "\n".join(f"{name:<{width}} {text}" for name, text in rows)


def _teacher_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    each = facts["teacher_flops_per_token"]
    if not each:
        return []
    text = f"{each:.4g} FLOPs per token, {each * facts['total_tokens']:.4g} in all; in no step's time above, nor in MFU"
    return [("teachers", text)]


def _phase(facts: dict[str, Any]) -> str:
    drawn = " | ".join(f"{name} {tokens:,}" for name, tokens in facts["drawn_tokens"].items())
    return f"{facts['name']}, steps {facts['first_step'] + 1:,} to {facts['last_step']:,}, tokens: {drawn}"


def _pattern(layers: list[str]) -> str:
    return "" if layers == list(DEFAULT_LAYERS) else f", layers [{', '.join(layers)}] repeated"


def _backend(facts: dict[str, Any]) -> str:
    """Return " native" or " emulated" behind a recipe that quantises; the layers' line has the reason."""
    quantises = any(
        "block" in slot for part in (facts, *facts["phases"], *facts["module_casts"]) for slot in part["slots"].values()
    )
    return f" {facts['runs']}" if quantises else ""


def _precision(facts: dict[str, Any]) -> str:
    """Return the recipe, what it could not keep of its source, and how it runs, of `precision_facts`."""
    counts = facts["layers"]["coverage"]
    return f"{facts['name']}{Coverage(**counts).suffix if counts else ''}{_backend(facts)}"


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
