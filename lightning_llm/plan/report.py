"""What a run would do, said before anything is paid for: the verb `plan`, and the first line of `train`."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from lightning_llm.config.identity import config_hash
from lightning_llm.config.redact import with_credentials
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.model import DEFAULT_LAYERS
from lightning_llm.hardware import describe_device
from lightning_llm.model.flops import count_parameters, flops_per_token
from lightning_llm.model.linear_names import linear_names
from lightning_llm.plan.check import native_decision
from lightning_llm.plan.describe import byte_rows, cost_facts, layout_facts, layout_rows, traffic_row
from lightning_llm.plan.matrix import matrix_facts, matrix_of, render_matrix
from lightning_llm.plan.nodes import reduction_note, with_reduction
from lightning_llm.precision.describe import precision_facts, precision_rows
from lightning_llm.run.checked_config import checked_config

if TYPE_CHECKING:
    import torch


def plan(arguments: argparse.Namespace) -> int:
    """Print the plan of one run, with --matrix how every recipe would run where, with -m the jobs of a sweep.

    As text or, with --json, as data.
    """
    if arguments.multirun:
        from lightning_llm.sweep.outline import outline

        return outline(arguments)
    config = checked_config(arguments, to_train=False)
    if arguments.matrix:
        made = matrix_of(config)
        print(json.dumps(matrix_facts(made), indent=1) if arguments.json else render_matrix(made))
        return 0
    facts = plan_facts(config)
    print(json.dumps(facts, indent=1) if arguments.json else "\n".join([render(facts), *notes(config)]))
    return 0


def plan_facts(config: Config) -> dict[str, Any]:
    """Return the plan as plain data: choices, `parameters`, `layers` (a pattern), `flops_per_token`, bytes by kind.

    `memory_bytes` are those a rank holds, `bytes_sent` those it sends in a step, `traffic_bytes` where those go.
    Raises ConfigError where the degrees do not multiply to the world.
    """
    config = with_reduction(config)  # as `train` does before anything takes its hash
    tokens = config.data.global_batch_size * config.data.sequence_length
    layout = layout_facts(config)
    return {
        "model": config.model.name,
        "parameters": count_parameters(config.model).total,
        "layers": list(config.model.layers or DEFAULT_LAYERS),
        "layout": layout,
        "precision": precision_facts(
            config.precision, native_decision(config), linear_names(config.model), config.model.num_layers
        ),
        "data": config.data.name,
        "step_tokens": tokens,
        "accumulation": layout["micro_batches_per_rank"],
        "total_tokens": tokens * config.trainer.max_steps,
        "max_steps": config.trainer.max_steps,
        "flops_per_token": flops_per_token(config.model, config.data.sequence_length),
        **cost_facts(config),
        "config_hash": config_hash(config),
        "run_dir": config.run.dir,
    }


def plan_line(config: Config, device: "torch.device") -> str:
    """Return the one line that `train` prints before it starts."""
    facts = plan_facts(config)
    layout = facts["layout"]
    ranks = f" on {layout['world']} ranks" if layout["world"] > 1 else ""
    parts = [
        f"{facts['model']} {_count(facts['parameters'])} parameters",
        f"{layout['name']}{ranks}{' compiled' if layout['compile'] else ''}",
        f"{facts['precision']['name']}{_backend(facts['precision'])}",
        f"{facts['data']}",
        f"{facts['step_tokens']:,} tokens/step x {facts['max_steps']:,} steps",
        describe_device(device),
    ]
    return "plan   " + " | ".join(parts)


def notes(config: Config) -> list[str]:
    """Return what is allowed and may still surprise, one line each."""
    schedule, steps = config.schedule, config.trainer.max_steps
    told = []
    if (uri := config.logger.tracking_uri) and with_credentials(uri) != uri:
        told.append(
            "note   the password in logger.tracking_uri is written nowhere: to go on later, give that key again, or "
            "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    if schedule.name != "constant" and schedule.warmup_steps >= (schedule.total_steps or steps):
        told.append(
            f"note   schedule.warmup_steps={schedule.warmup_steps} is no shorter than trainer.max_steps={steps}: the "
            "learning rate is still rising when the run ends"
        )
    if (reduction := reduction_note(with_reduction(config))) is not None:
        told.append(reduction)
    return told


def render(facts: dict[str, Any]) -> str:
    """Return `plan_facts` as lines for a terminal."""
    rows = [
        ("model", f"{facts['model']}, {facts['parameters']:,} parameters{_pattern(facts['layers'])}"),
        *layout_rows(facts["layout"]),
        *precision_rows(facts["precision"]),
        (
            "data",
            f"{facts['data']}, {facts['step_tokens']:,} tokens/step, micro-batches per rank: {facts['accumulation']}",
        ),
        ("length", f"{facts['max_steps']:,} steps, {facts['total_tokens']:,} tokens"),
        (
            "FLOPs",
            f"{facts['flops_per_token']:.4g} per token, {facts['flops_per_token'] * facts['total_tokens']:.4g} in all",
        ),
        *byte_rows("memory", "per rank, estimated", facts["memory_bytes"]),
        *byte_rows("sent", "per rank and step", facts["bytes_sent"]),
        *([traffic_row(facts)] if facts["layout"]["world"] > 1 else []),
        ("identity", facts["config_hash"]),
        ("folder", facts["run_dir"]),
    ]
    return "\n".join(f"{name:<17} {text}" for name, text in rows)


def _pattern(layers: list[str]) -> str:
    return "" if layers == list(DEFAULT_LAYERS) else f", layers [{', '.join(layers)}] repeated"


def _backend(facts: dict[str, Any]) -> str:
    """Return " native" or " emulated" behind a recipe that quantises; why is said where its layers are counted."""
    quantises = any(
        "block" in slot for part in (facts, *facts["phases"], *facts["module_casts"]) for slot in part["slots"].values()
    )
    return f" {facts['runs']}" if quantises else ""


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
