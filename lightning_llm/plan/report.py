"""The plan of one run as data and as text, and notes on it: output of `plan`, first lines of `train`. Imports no torch.

A note names a setting that is allowed but may surprise, or a known issue of the machine. A known issue is a rule over
the plan and the environment that yields messages. The documentation lists the first line of its docstring; the `Source`
line names the evidence. Versions that cannot run a recipe are rejected in `precision/native` instead: Transformer
Engine before 2.20 (2.0 and 2.1 gave wrong weight gradients with overlapped tensor parallelism,
https://github.com/NVIDIA/TransformerEngine/issues/1616), and FP8 by blocks before CUDA 12.9.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.redact import with_credentials
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.model import DEFAULT_LAYERS, ModelConfig
from lightning_llm.config.weight_folders import TOKENIZER, UNNAMED
from lightning_llm.data.report import planned_phases
from lightning_llm.model.attention.kinds import AttentionSpec
from lightning_llm.model.attention.latent_kind import LatentAttention
from lightning_llm.model.experts.kinds import MoE
from lightning_llm.model.flops import count_parameters, flops_per_token
from lightning_llm.model.interop.families import architecture, without_counterpart
from lightning_llm.model.structure import experts_by_linear, feed_forward_of, linear_names, mixer_of, parameter_shapes
from lightning_llm.optim.kinds import DTYPE_BYTES
from lightning_llm.plan.checkpoints import disk_facts, disk_notes, disk_row
from lightning_llm.plan.describe import cost_facts, layout_facts, layout_rows, memory_rows, sent_rows, traffic_row
from lightning_llm.plan.memory import OURS, Accounting
from lightning_llm.plan.memory.activations import on_gpu
from lightning_llm.plan.memory.fit import hardware_facts, hardware_row
from lightning_llm.plan.memory.units import shard_ranks, uses_fsdp
from lightning_llm.plan.nodes import reduction_note
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.step_law import law_notes, law_row
from lightning_llm.plan.teachers import teacher_flops_per_token
from lightning_llm.plan.time.describe import time_facts, time_rows
from lightning_llm.precision.describe import precision_facts, precision_rows
from lightning_llm.precision.module_rules import Coverage, alike_experts
from lightning_llm.precision.native.decide import HARDWARE
from lightning_llm.precision.native.express import why_one_by_one

Rule = Callable[[Plan, Mapping[str, str]], Iterator[str]]
SHORTENED = ("BF16", "F16", "TF32", "ANY")


def origin_facts(config: Config) -> dict[str, str | None]:
    """Return `weights` and `tokenizer` as text; `export`, the transformers class, or `export_problem`."""
    exported, problem = None, None
    try:
        exported = architecture(config.model).class_name
    except ConfigError:
        problem = f"none: {without_counterpart(config.model)}. Its checkpoints remain (docs/howto/import_export.md)"
    return {
        "weights": weights_text(config),
        "tokenizer": tokenizer_text(config),
        "export": exported,
        "export_problem": problem,
    }


def origin_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return `origin_facts` as lines for a terminal, each a name and a text."""
    export = facts["export"] or facts["export_problem"]
    return [("weights", facts["weights"]), ("tokenizer", facts["tokenizer"]), ("export", export)]


def origin_lines(config: Config) -> list[str]:
    """Return the lines that a run prints if it begins at step 0."""
    facts = origin_facts(config)
    lines = [f"begin  weights {facts['weights']}", f"begin  tokenizer {facts['tokenizer']}"]
    return lines if facts["export"] else [*lines, f"note   export to transformers: {facts['export_problem']}"]


def weights_text(config: Config) -> str:
    """Return the origin of the first step's weights."""
    model = config.model
    if config.branch_from is not None:
        return f"from the checkpoint at branch_from={config.branch_from}"
    if config.resume not in (None, "auto"):
        return f"from the checkpoint at resume={config.resume}"
    if model.init_from == UNNAMED:
        return f"{UNNAMED}: train requires model.init_from=PATH, or null for random weights"
    if model.init_from is not None:
        return f"from model.init_from={model.init_from}, {len(parameter_shapes(model)):,} tensors"
    scheme = f"random: model.init={model.init}, model.init_std={model.init_std:g}, seed={config.seed}"
    return f"{scheme}; resume=auto continues from a checkpoint if there is one" if config.resume else scheme


def tokenizer_text(config: Config) -> str:
    """Return the origin of the tokenizer."""
    tokenizer, model = config.data.tokenizer, config.model
    if tokenizer.kind == "bytes":
        return "bytes"
    if tokenizer.kind == "file":
        path, weights = Path(tokenizer.path or ""), model.init_from
        own = weights is not None and path in (Path(weights), Path(weights, TOKENIZER))
        return f"{path}, of the weights" if own else str(path)
    if model.init_from == UNNAMED and config.branch_from is None:
        return "of the weights (their tokenizer.json), unless data.tokenizer names another"
    sources = ", ".join(config.data.trained_weights)
    return f"bpe of {tokenizer.vocab_size or model.vocab_size:,} tokens, trained on the training documents of {sources}"


def plan_facts(plan: Plan, accounting: Accounting = OURS) -> dict[str, Any]:
    """Return the plan as plain data, the output of `plan --json`.

    - `model`, `parameters`, `layers`, `flops_per_token`, `teacher_flops_per_token`: the model, its pattern of layers,
      and its cost; FLOPs of teachers are separate. With experts also `active_parameters`, those that a token passes;
      with latent attention `cache_bytes_per_token`, those that generation keeps for a token in all blocks.
    - `layout`, `precision`, `data`, `phases`: the layout with its groups, micro-batches and stages; the six slots and
      who computes them; the data and its phases.
    - `step_tokens`, `accumulation`, `total_tokens`, `max_steps`: tokens of a step, micro-batches per rank, length.
    - `weights`, `tokenizer`: origin of the initial weights and the tokenizer, as text.
    - `export`, `export_problem`: the transformers class that `export` writes; if null, the reason.
    - `memory_bytes`: largest bytes of each kind at any time, and `total`, all kinds at the peak.
    - `memory_peak`: `memory_peak.moment`, `memory_peak.bytes`: when the peak is, and the bytes of each kind then.
    - `accounting`: the trainer that memory is computed for: `lightning_llm`, `torchtitan` or `megatron`.
    - `bytes_sent`: bytes that a rank sends per step, by collective.
    - `traffic_bytes`: mean over ranks, `traffic_bytes.within_nodes` and `traffic_bytes.between_nodes`.
    - `step_seconds`, `time`: below; null without a cluster.
    - `hardware`: `memory_bytes` of a device, whether the plan `fits`, `spare_bytes`, a `change` that would make it fit;
      on a GPU, a `faster` one that fits.
    - `disk`: `checkpoint_bytes` of one checkpoint, the largest number of `checkpoints` at a time, their `bytes`.
    - `step_law`: the law that sets rate and batch size, if one is used.
    - `config_hash`, `run_dir`: the config's hash; the run's folder.
    """
    config = plan.config
    tokens = config.data.global_batch_size * config.data.sequence_length
    layout = layout_facts(plan)
    return {
        "model": config.model.name,
        "parameters": count_parameters(config.model).total,
        **_active_parameters(config.model),
        **_cache_bytes(config),
        "layers": list(config.model.layers or DEFAULT_LAYERS),
        "layout": layout,
        "precision": _precision_facts(plan),
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
    """Return the line that `train` prints before it starts; `device`: a description."""
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


def _precision_facts(plan: Plan) -> dict[str, Any]:
    """Return `precision_facts`, with how native experts run as "experts"."""
    model, recipe = plan.config.model, plan.config.precision
    experts = experts_by_linear(model)
    facts = precision_facts(recipe, plan.decision, linear_names(model), model.num_layers, experts)
    if not experts or not plan.decision.natives:
        return facts
    sharded = uses_fsdp(plan.config.parallel, plan.degrees)
    reasons = dict.fromkeys(why_one_by_one(native, sharded) for native in plan.decision.natives)
    if any(len(alike_experts(*pair, recipe, model.num_layers)) > 1 for pair in experts.items()):
        reasons = {"rules of precision.modules name single ones": None}
    ways = ("one GroupedLinear for all" if why is None else f"a Linear for each, since {why}" for why in reasons)
    return facts | {"experts": "; ".join(ways)}


def _active_parameters(model: ModelConfig) -> dict[str, int]:
    count = count_parameters(model)
    return {} if count.active == count.total else {"active_parameters": count.active}


def _cache_bytes(config: Config) -> dict[str, int]:
    """Return the bytes of keys, values and latents that generation keeps for a token, if a block has latents."""
    mixers = [mixer_of(config.model, index) for index in range(config.model.num_layers)]
    if not any(isinstance(mixer, LatentAttention) for mixer in mixers):
        return {}
    elements = sum(mixer.cached_elements(config.model) for mixer in mixers if isinstance(mixer, AttentionSpec))
    return {"cache_bytes_per_token": elements * DTYPE_BYTES[config.precision.compute_dtype]}


def _cache_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "cache_bytes_per_token" not in facts:
        return []
    return [("  generation", f"keeps {facts['cache_bytes_per_token']:,} bytes per token and sequence, in all blocks")]


def _active(facts: dict[str, Any]) -> str:
    return f", {facts['active_parameters']:,} of them active" if "active_parameters" in facts else ""


def render(facts: dict[str, Any]) -> str:
    """Return `plan_facts` as lines for a terminal."""
    rows = [
        (
            "model",
            f"{facts['model']}, {facts['parameters']:,} parameters{_active(facts)}{_layers_text(facts['layers'])}",
        ),
        *_cache_rows(facts),
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
        ("config hash", facts["config_hash"]),
        ("folder", facts["run_dir"]),
    ]
    width = max(17, *(len(name) for name, _ in rows))
    return "\n".join(f"{name:<{width}} {text}" for name, text in rows)


def _teacher_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    each = facts["teacher_flops_per_token"]
    if not each:
        return []
    text = f"{each:.4g} FLOPs per token, {each * facts['total_tokens']:.4g} in all; not in the step's time or MFU"
    return [("teachers", text)]


def _phase(facts: dict[str, Any]) -> str:
    drawn = " | ".join(f"{name} {tokens:,}" for name, tokens in facts["drawn_tokens"].items())
    return f"{facts['name']}, steps {facts['first_step'] + 1:,} to {facts['last_step']:,}, tokens: {drawn}"


def _layers_text(layers: list[str]) -> str:
    """Return the pattern of layers, e.g. ", layers [dense x 3, moe x 58] repeated"; "" for the default."""
    if layers == list(DEFAULT_LAYERS):
        return ""
    runs = [(name, len(list(alike))) for name, alike in groupby(layers)]
    return f", layers [{', '.join(name if count == 1 else f'{name} x {count}' for name, count in runs)}] repeated"


def _backend(facts: dict[str, Any]) -> str:
    """Return " native" or " emulated" for a recipe that quantizes; the line on layers has the reason."""
    quantizes = any(
        "block" in slot for part in (facts, *facts["phases"], *facts["module_casts"]) for slot in part["slots"].values()
    )
    return f" {facts['runs']}" if quantizes else ""


def _precision(facts: dict[str, Any]) -> str:
    """Return the recipe's name, its coverage, and whether it runs natively, from `precision_facts`."""
    counts = facts["layers"]["coverage"]
    return f"{facts['name']}{Coverage(**counts).suffix if counts else ''}{_backend(facts)}"


def _count(number: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _one_queue(plan: Plan, environment: Mapping[str, str]) -> Iterator[str]:
    """`CUDA_DEVICE_MAX_CONNECTIONS=1` with sharded parameters: gathers wait for the GEMMs they should overlap with.

    Source: Megatron-FSDP's user guide (docs.nvidia.com/megatron-core, "CUDA_DEVICE_MAX_CONNECTIONS").
    """
    sharded = shard_ranks(plan.config.parallel, plan.degrees) > 1
    if on_gpu(plan) and sharded and environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 is for Megatron's tensor parallelism and keeps FSDP2's gathers behind the "
            "GEMMs: unset it"
        )


def _tf32(plan: Plan, environment: Mapping[str, str]) -> Iterator[str]:
    """TF32 forced by the environment: products that the recipe has in fp32 use 10 bits of mantissa.

    Source: PyTorch's CUDA environment variables; cuBLAS's documentation of `NVIDIA_TF32_OVERRIDE`.
    """
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        if on_gpu(plan) and environment.get(name) == "1":
            yield f"{name}=1 turns fp32 products into TF32, against the recipe: unset it"


def _short_cpu_products(plan: Plan, environment: Mapping[str, str]) -> Iterator[str]:
    """oneDNN's implicit down-conversion on a CPU: fp32 products, and sums of emulated casts, use fewer bits.

    Source: oneDNN's developer guide, "Primitive Attributes: floating-point math mode".
    """
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"):
        mode = environment.get(name, "").upper()
        if not on_gpu(plan) and mode in SHORTENED:
            yield f"{name}={environment[name]} lets oneDNN multiply fp32 numbers in fewer bits: unset it"


RULES: tuple[Rule, ...] = (_one_queue, _tf32, _short_cpu_products)


def known_issues(plan: Plan, environment: Mapping[str, str]) -> list[str]:
    """Return a note on each setting in `environment` that is known to harm the planned run."""
    return [f"note   here {text}" for rule in RULES for text in rule(plan, environment)]


def _mixture_notes(kind: MoE) -> Iterator[str]:
    rate = kind.router.bias_update_rate
    if rate is not None and kind.balance_loss:
        text = "both push experts towards equal loads. Set one of them to 0 or null to see the effect of the other"
        yield f"note   router.bias_update_rate={rate:g} and balance_loss={kind.balance_loss:g} {text}"
    if kind.capacity_factor is not None and kind.capacity_factor < 1:
        share = f"{1 - kind.capacity_factor:.3g} of all choices, even with equal loads"
        yield f"note   capacity_factor={kind.capacity_factor:g} drops at least {share}; moe/dropped has the share"


def notes(plan: Plan, *, to_train: bool) -> list[str]:
    """Return notes on settings that are allowed but may surprise, one line each. `to_train`: the run starts here."""
    config = plan.config
    schedule, steps = config.schedule, config.trainer.max_steps
    found = []
    if (uri := config.logger.tracking_uri) and with_credentials(uri) != uri:
        found.append(
            "note   the password in logger.tracking_uri is not saved: to resume, give that key again, or "
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
    kinds = (feed_forward_of(config.model, index) for index in range(config.model.num_layers))
    found += dict.fromkeys(note for kind in kinds if isinstance(kind, MoE) for note in _mixture_notes(kind))
    if (judged := _hardware_note(plan, to_train)) is not None:
        found.append(judged)
    return [*found, *known_issues(plan, os.environ), *(disk_notes(config) if to_train else ())]


def _hardware_note(plan: Plan, to_train: bool) -> str | None:
    """Return a note if native casts were decided for another device than the one the run is planned for."""
    config, here = plan.config, plan.capability.device
    if not config.precision.quantizes:
        return None
    if to_train:  # on this machine's device
        if config.hardware is None or here == HARDWARE[config.hardware].device:
            return None
        return f"note   hardware={config.hardware} is for `plan`: casts run as this machine's device ({here}) allows"
    if config.planned_hardware is None and plan.degrees.world > config.trainer.devices:
        return (
            f"note   native or emulated is decided for this machine ({here}); hardware=h100 (or a100, b200, ...) "
            "decides for the device that the run is planned for"
        )
    return None
