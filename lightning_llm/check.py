"""Rules across groups, and the state of the disk: all that can be known before anything heavy is imported."""

import os
import shutil
from pathlib import Path

from lightning_llm.data.cache import nearest_existing
from lightning_llm.data.check import check_data
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.model.flops import count_parameters
from lightning_llm.model.linear_names import linear_inputs, linear_names, linear_widths
from lightning_llm.optim.state_bytes import state_bytes
from lightning_llm.parallel.degrees import Degrees, fitting_degrees, given_degrees, layout_problems
from lightning_llm.parallel.divisibility import cut_problems
from lightning_llm.parallel.stages import pipeline_problems
from lightning_llm.precision.capability import Capability, capability_here, device_here
from lightning_llm.precision.lint import lint
from lightning_llm.precision.module_rules import nothing_converted, reasons_to_stay_high, unmatched
from lightning_llm.precision.native import Decision, decide
from lightning_llm.schema import Config, ModelConfig
from lightning_llm.schema.precision import PhaseConfig, PrecisionConfig, slots_of


def check_config(config: Config, to_train: bool = True) -> None:
    """Return quietly if the run can start here; without `to_train`, if it could on the machine it is planned for.

    Raises:
        ConfigError: with every rule that is broken.
    """
    world = config.world or config.trainer.devices
    degrees = fitting_degrees(config.parallel, world)
    problems = [
        *(shape := shape_problems(config.model)),
        *_length_problems(config),
        *_schedule_problems(config),
        *layout_problems(config.parallel, world),
        *([] if shape else cut_problems(config, degrees or given_degrees(config.parallel))),
        *pipeline_problems(config, degrees),
        *lint(config.precision),
        *_precision_problems(config),
        *_update_problems(config, degrees or given_degrees(config.parallel)),
        *_native_problems(config, to_train),
        *check_data(config.data, config.model.vocab_size, degrees.dp if degrees else 1),
    ]
    if problems:
        raise ConfigError(problems)


def check_disk(config: Config, jobs: int = 1) -> None:
    """Return quietly if run.dir can be written and there is room for the checkpoints of `jobs` runs like this.

    Raises:
        ConfigError: no right to write, or too little space, with the arithmetic.
    """
    folder = nearest_existing(Path(config.run.dir))
    if ".." in Path(config.run.name).parts or Path(config.run.name).is_absolute():
        text = f"is '{config.run.name}', which leads out of run.root/experiment. Name the folder itself as run.dir."
        raise ConfigError(Problem("run.name", text))
    if not os.access(folder, os.W_OK):
        raise ConfigError(
            Problem("run.dir", f"{config.run.dir} cannot be written ({folder} refuses). Choose another run.root.")
        )
    if not folder.is_dir():
        raise ConfigError(Problem("run.dir", f"{folder} is a file, not a folder. Choose another run.dir."))
    each = state_bytes(count_parameters(config.model, padded=True).total, config.precision).checkpoint
    kept = config.checkpoint.keep_last * jobs + 1  # a new one is whole before the oldest goes
    free = shutil.disk_usage(folder).free
    if each * kept > free:
        text = (
            f"{kept} checkpoints of {each / 1e9:.2f} GB each (keep_last x runs + 1) need {each * kept / 1e9:.2f} GB "
            f"and {folder} has {free / 1e9:.2f} GB free. Lower checkpoint.keep_last, or choose another run.root."
        )
        raise ConfigError(Problem("checkpoint.keep_last", text))


def shape_problems(model: ModelConfig) -> list[Problem]:
    """Return what does not fit together in a model's shape."""
    problems = []
    if model.head_dim is None and model.hidden_size % model.num_heads:
        text = f"{model.hidden_size} is no multiple of model.num_heads={model.num_heads}. Change one, or set head_dim."
        problems.append(Problem("model.hidden_size", text))
    elif model.position == "rope" and model.attention_head_dim % 2:
        text = f"is {model.attention_head_dim}, and position=rope turns pairs of features. Make it even."
        problems.append(Problem("model.head_dim", text))
    if model.num_heads % model.num_kv_heads:
        text = (
            f"model.num_heads={model.num_heads} is no multiple of {model.num_kv_heads}: each must serve equally many."
        )
        problems.append(Problem("model.num_kv_heads", text))
    if model.rope_scaling is not None and model.position != "rope":
        text = f"is set, and model.position={model.position}. Set it to null, or position to rope."
        problems.append(Problem("model.rope_scaling", text))
    return problems


def _length_problems(config: Config) -> list[Problem]:
    longest = config.model.max_sequence_length
    if config.data.sequence_length <= longest:
        return []
    text = f"is {config.data.sequence_length}, above model.max_sequence_length={longest}. Lower it."
    return [Problem("data.sequence_length", text)]


def _schedule_problems(config: Config) -> list[Problem]:
    schedule, total = config.schedule, config.schedule.total_steps
    if schedule.name != "constant" and total is not None and schedule.warmup_steps >= total:
        text = f"is {schedule.warmup_steps}, and schedule.total_steps is {total}. Warm up for fewer."
        return [Problem("schedule.warmup_steps", text)]
    return []


def _precision_problems(config: Config) -> list[Problem]:
    recipe, problems = config.precision, []
    if (recipe.master_dtype, recipe.main_grad_dtype) not in (("fp32", "fp32"), ("bf16", "bf16")):
        text = (
            f"is {recipe.main_grad_dtype}, and gradients here take master_dtype={recipe.master_dtype}. Set them alike."
        )
        problems.append(Problem("precision.main_grad_dtype", text))
    if recipe.reduce_dtype != recipe.main_grad_dtype:
        text = (
            f"is {recipe.reduce_dtype}, and main_grad_dtype is {recipe.main_grad_dtype}: one tree sums gradients over "
            "micro-batches and ranks, so that a step's bits do not tell how many ranks made it. Set them alike."
        )
        problems.append(Problem("precision.reduce_dtype", text))
    reasons = reasons_to_stay_high(linear_names(config.model), recipe, config.model.num_layers)
    problems += nothing_converted(recipe, reasons) or unmatched(recipe, reasons)
    return problems + _rotation_problems(config)


def _update_problems(config: Config, degrees: Degrees) -> list[Problem]:
    """Return where delayed scales are to move with every micro-batch, and a pipeline has several under way at once."""
    if degrees.pp == 1 or not config.precision.updates_every_micro_batch:
        return []
    text = (
        f"is {degrees.pp}, and the recipe's delayed scales move with every micro-batch (update: micro_batch): a stage "
        "runs later micro-batches' forward passes before an earlier one's backward pass has its amax, so what an "
        "update knows would depend on the schedule. Set 1, or update: step."
    )
    return [Problem("parallel.pp", text)]


def native_decision(config: Config, here: Capability | None = None) -> Decision:
    """Return whether the recipe's quantised GEMMs run natively on `here`; None: on what this machine would train on."""
    recipe = config.precision
    if here is None:
        # Transformer Engine is imported to see whether it can be, which takes seconds: not for bf16.
        here = (capability_here if recipe.quantises else device_here)(config.trainer.accelerator)
    return decide(recipe, here, linear_widths(config.model), config.model.bias, _shared_axes(config))


def _shared_axes(config: Config) -> dict[str, str]:
    """Return the axes whose ranks have a part of a linear's tensors or of the layers: degrees in words, by key."""
    world, given = config.world or config.trainer.devices, config.parallel
    degrees = fitting_degrees(given, world) or given_degrees(given)
    shared = {axis: degree for axis in ("tp", "cp", "pp") if (degree := getattr(degrees, axis)) > 1}
    return {
        f"parallel.{axis}": f"{degree}" if getattr(given, axis) else f"null, which is {degree} of {world} ranks"
        for axis, degree in shared.items()
    }


def _native_problems(config: Config, to_train: bool) -> list[Problem]:
    """Return why what was asked for cannot run natively; where that does not matter the machine is not looked at.

    A plan shows what is refused instead.
    """
    recipe = config.precision
    if not recipe.quantises or not (recipe.backend == "native" or config.parallel.compile):
        return []
    decision = native_decision(config)
    problems = decision.refusals() if to_train else []
    if config.parallel.compile and decision.runs != "native":
        text = (
            "does not go with emulated casts, which are compiled by themselves. Set trainer.compile=false, "
            "which it follows, or itself. "
            f"They do not run natively: {decision.reason}."
        )
        problems.append(Problem("parallel.compile", text))
    return problems


def _rotation_problems(config: Config) -> list[Problem]:
    """Return where a Hadamard transform does not divide the axis it turns; blocks are padded, rotations cannot be."""
    data, inputs, outputs = config.data, linear_inputs(config.model), linear_widths(config.model)
    tokens = {"data.micro_batch_size x sequence_length": data.micro_batch_size * data.sequence_length}
    axes = {"fprop": inputs, "dgrad": outputs, "wgrad": tokens}
    parts: list[PrecisionConfig | PhaseConfig] = [config.precision, *config.precision.phases]
    found = {
        (axis, length, slot, cast.hadamard.size)
        for part in parts
        for slot, cast in slots_of(part).items()
        if cast.hadamard is not None
        for axis, length in axes[slot.partition(".")[0]].items()
        if length % cast.hadamard.size
    }
    return [
        Problem(
            f"precision.{slot}.hadamard.size", f"{size} does not divide {axis} = {length}, which that GEMM sums over."
        )
        for axis, length, slot, size in sorted(found)
    ]
