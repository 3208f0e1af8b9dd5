"""What a run would do, said before anything is paid for: the verb `plan`, and the first line of `train`."""

import argparse
import json
from typing import Any

from lightning_llm.check import check_config
from lightning_llm.compose import compose_config, load_config
from lightning_llm.identity import config_hash
from lightning_llm.model.flops import count_parameters, flops_per_token
from lightning_llm.schema import Config, PrecisionConfig
from lightning_llm.schema.precision import slots_of

EMULATED = "no native backend in this version: exact operands through a GEMM in high precision"
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def plan(arguments: argparse.Namespace) -> int:
    """Print the plan of one run as text or, with --json, as data."""
    if arguments.config:
        config = load_config(arguments.config, arguments.overrides)
    else:
        config = compose_config(arguments.overrides, arguments.config_dir)
    check_config(config)
    facts = plan_facts(config)
    print(json.dumps(facts, indent=1) if arguments.json else render(facts))
    return 0


def plan_facts(config: Config) -> dict[str, Any]:
    """Return the plan as plain data: choices, `parameters`, `memory_bytes` per rank by kind, `flops_per_token`."""
    tokens = config.data.global_batch_size * config.data.sequence_length
    world = config.world or config.trainer.devices
    return {
        "model": config.model.name,
        "parameters": count_parameters(config.model).total,
        "layout": {"name": config.parallel.name, "world": world, "compile": config.parallel.compile},
        "precision": precision_facts(config.precision),
        "data": config.data.name,
        "step_tokens": tokens,
        "accumulation": config.data.global_batch_size // (config.data.micro_batch_size * world),
        "total_tokens": tokens * config.trainer.max_steps,
        "max_steps": config.trainer.max_steps,
        "flops_per_token": flops_per_token(config.model, config.data.sequence_length),
        "memory_bytes": memory_bytes(config),
        "config_hash": config_hash(config),
        "run_dir": config.run.dir,
    }


def precision_facts(recipe: PrecisionConfig) -> dict[str, Any]:
    """Return the recipe as data: its identity, and for each operand slot its cast and how that runs here, and why."""
    slots: dict[str, dict[str, Any]] = {}
    for slot, cast in slots_of(recipe).items():
        if not cast.quantises:
            slots[slot] = {"format": recipe.compute_dtype, "runs": "native", "reason": "not quantised"}
            continue
        turned = f"H{cast.hadamard.size} {cast.hadamard.signs} signs" if cast.hadamard else None
        details = {"format": cast.format, "block": cast.block, "scale": cast.scale, "rounding": cast.rounding}
        slots[slot] = {**details, "hadamard": turned, "runs": "emulated", "reason": EMULATED}
    high = recipe.modules.model_dump(exclude_defaults=True)
    return {
        "name": recipe.name,
        "compute_dtype": recipe.compute_dtype,
        "master_dtype": recipe.master_dtype,
        "recipe_hash": recipe.recipe_hash,
        "reference": recipe.reference,
        "hardware": recipe.hardware,
        "modules": high,
        "slots": slots,
        "phases": [phase.model_dump() for phase in recipe.phases],
    }


def memory_bytes(config: Config) -> dict[str, int]:
    """Return bytes on one rank by kind, for parallel=single.

    Parameters, gradients and AdamW's two moments are fp32, 4 bytes each; `compute_copies` are the weights of one
    forward in the compute dtype. Activations follow Korthikanti et al. 2022 (arXiv 2205.05198) eq. 1 without the
    attention-score term, which SDPA does not store: 34 s b h per layer in 16 bit, 2 s b h with full recomputation;
    logits are s b V in the compute dtype and twice in fp32 (log-probabilities and their gradient).
    """
    model, data = config.model, config.data
    count = count_parameters(model, padded=True).total
    width = BYTES[config.precision.compute_dtype]
    tokens = data.micro_batch_size * data.sequence_length
    per_layer = 2 if config.parallel.activation_checkpoint == "full" else 34
    return {
        "parameters": 4 * count,
        "gradients": 4 * count,
        "optimizer": 8 * count,
        "compute_copies": 0 if config.precision.compute_dtype == "fp32" else width * count,
        "activations": per_layer * tokens * model.hidden_size * model.num_layers * width // 2,
        "logits": tokens * model.padded_vocab_size * (width + 8),
    }


def plan_line(config: Config, device: Any) -> str:
    """Return the one line that `train` prints before it starts."""
    facts = plan_facts(config)
    parts = [
        f"{facts['model']} {_count(facts['parameters'])} parameters",
        f"{facts['layout']['name']}{' compiled' if facts['layout']['compile'] else ''}",
        facts["precision"]["name"],
        f"{facts['data']}",
        f"{facts['step_tokens']:,} tokens/step x {facts['max_steps']:,} steps",
        describe_device(device),
    ]
    return "plan   " + " | ".join(parts)


def render(facts: dict[str, Any]) -> str:
    """Return `plan_facts` as lines for a terminal."""
    memory = facts["memory_bytes"]
    rows = [
        ("model", f"{facts['model']}, {facts['parameters']:,} parameters"),
        ("layout", f"{facts['layout']['name']}, {facts['layout']['world']} rank(s)"),
        (
            "precision",
            f"{facts['precision']['name']} ({facts['precision']['recipe_hash']}), {_high(facts['precision'])}",
        ),
        *((f"  {slot}", _cast(each)) for slot, each in facts["precision"]["slots"].items()),
        (
            "data",
            f"{facts['data']}, {facts['step_tokens']:,} tokens/step, {facts['accumulation']} micro-batch(es) per rank",
        ),
        ("length", f"{facts['max_steps']:,} steps, {facts['total_tokens']:,} tokens"),
        (
            "FLOPs",
            f"{facts['flops_per_token']:.4g} per token, {facts['flops_per_token'] * facts['total_tokens']:.4g} in all",
        ),
        ("memory", f"{sum(memory.values()) / 1e9:.3f} GB per rank, estimated"),
        *((f"  {kind}", f"{size / 1e9:.3f} GB") for kind, size in memory.items()),
        ("identity", facts["config_hash"]),
        ("folder", facts["run_dir"]),
    ]
    if facts["precision"]["phases"]:
        rows.append(("phases", _phases(facts["precision"])))
    return "\n".join(f"{name:<18}{text}" for name, text in rows)


def _cast(slot: dict[str, Any]) -> str:
    if "block" not in slot:
        return str(slot["format"])
    turned = f", {slot['hadamard']}" if slot["hadamard"] else ""
    return f"{slot['format']} {slot['block']}, {slot['scale']} scale, {slot['rounding']}{turned}: {slot['runs']}"


def _phases(facts: dict[str, Any]) -> str:
    return "; ".join(
        f"from {phase['start']:.0%} to {phase['end']:.0%} of the steps other slots" for phase in facts["phases"]
    )


def _high(facts: dict[str, Any]) -> str:
    rules = ", ".join(f"{key}={value}" for key, value in facts["modules"].items())
    return f"computing in {facts['compute_dtype']}, master weights {facts['master_dtype']}" + (
        f", {rules}" if rules else ""
    )


def describe_device(device: Any) -> str:
    """Return e.g. "cpu, 2 threads" or "NVIDIA H100 80GB HBM3"."""
    import torch

    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"cpu, {torch.get_num_threads()} threads"


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
