"""What a run would do, said before anything is paid for: the verb `plan`, and the first line of `train`."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from lightning_llm.check import check_config
from lightning_llm.compose import compose_config, load_config
from lightning_llm.hardware import describe_device
from lightning_llm.identity import config_hash
from lightning_llm.model.flops import count_parameters, flops_per_token
from lightning_llm.optim.state_bytes import DTYPE_BYTES, state_bytes
from lightning_llm.precision.describe import precision_facts, precision_rows
from lightning_llm.schema import Config

if TYPE_CHECKING:
    import torch


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


def memory_bytes(config: Config) -> dict[str, int]:
    """Return bytes on one rank by kind, for parallel=single.

    `compute_copies` are the weights of one forward in the compute dtype, where that is not the master's. Activations
    follow Korthikanti et al. 2022 (arXiv 2205.05198) eq. 1 without the attention-score term, which SDPA does not store:
    34 s b h per layer in 16 bit, 2 s b h with full recomputation; logits are s b V in the compute dtype and twice in
    fp32 (log-probabilities and their gradient).
    """
    model, data, recipe = config.model, config.data, config.precision
    count = count_parameters(model, padded=True).total
    state = state_bytes(count, recipe)
    width = DTYPE_BYTES[recipe.compute_dtype]
    tokens = data.micro_batch_size * data.sequence_length
    per_layer = 2 if config.parallel.activation_checkpoint == "full" else 34
    return {
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "compute_copies": 0 if recipe.compute_dtype == recipe.master_dtype else width * count,
        "activations": per_layer * tokens * model.hidden_size * model.num_layers * width // 2,
        "logits": tokens * model.padded_vocab_size * (width + 8),
    }


def plan_line(config: Config, device: "torch.device") -> str:
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
        *precision_rows(facts["precision"]),
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
    return "\n".join(f"{name:<18}{text}" for name, text in rows)


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
