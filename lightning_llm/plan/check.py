"""Rules between config groups: everything that can be checked before torch is imported."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.run_paths import run_path_problems, secret_problems, tracking_problems
from lightning_llm.config.schema import Config, PrecisionConfig
from lightning_llm.config.schema.callbacks import monitor_problems
from lightning_llm.config.schema.run import LauncherConfig
from lightning_llm.config.schema.validation import Rule, gather
from lightning_llm.data.check import batch_problems, data_rules
from lightning_llm.model.structure import experts_by_linear, frozen_names, linear_names, shape_problems
from lightning_llm.plan.attention_kernel import attention_kernel_problems
from lightning_llm.plan.axes.axis import AXES, MeshAxis
from lightning_llm.plan.checkpoints import retention_problems
from lightning_llm.plan.cluster import cluster_rules
from lightning_llm.plan.degrees import Degrees, checkpointing_problems, fit_problems
from lightning_llm.plan.divisibility import sharding_problems
from lightning_llm.plan.gradient_codes import gradient_reduction_problems
from lightning_llm.plan.memory.buffers import parameter_gather_problems, weight_cast_problems
from lightning_llm.plan.resolve import DerivedConfig, Plan, compiler_failure
from lightning_llm.plan.teachers import teacher_problems
from lightning_llm.precision.lint import lint
from lightning_llm.precision.module_rules import (
    nothing_converted,
    other_modules,
    reasons_to_stay_unquantized,
    unmatched,
)

EVALUATE = "lightning_llm.evaluate.during_training.Evaluate"
INSTALL_EVALUATION = "pip install 'lightning-llm[eval]'"


def check_config(config: Config, to_train: bool = True) -> Plan:
    """Return the plan of a valid config.

    Args:
        config: the config to check.
        to_train: the run starts on this machine; otherwise it is planned for the machine that the config names.

    Raises:
        ConfigError: with the problems of all violated rules.
    """
    derived = DerivedConfig(config, to_train=to_train)
    if problems := config_problems(derived):
        raise ConfigError(problems)
    return derived.plan()


def config_problems(derived: DerivedConfig) -> list[Problem]:
    """Return the conflicts between keys of a config, or of its valid part if some keys are invalid.

    `config.schema.validation` describes the valid part.
    """
    config, to_train = derived.config, derived.to_train
    rules: list[Rule] = [
        lambda: shape_problems(config.model),
        lambda: _length_problems(config),
        lambda: _schedule_problems(config),
        *_layout_rules(derived),
        lambda: lint(config.precision),
        lambda: _precision_problems(config),
        lambda: teacher_problems(config, derived.likely_degrees),
        lambda: attention_kernel_problems(derived),
        lambda: monitor_problems(config),
        lambda: evaluation_problems(config, derived.likely_degrees),
        lambda: run_path_problems(config),
        lambda: secret_problems(config),
        lambda: tracking_problems(config),
        *cluster_rules(config),
        lambda: retention_problems(config),
        lambda: _logger_problems(config) if to_train else [],
        lambda: _launcher_problems(config.launcher),
        *data_rules(lambda: config.data, lambda: config.model.vocab_size, lambda: derived.data_parallel_ranks),
    ]
    return gather(rules)


def _launcher_problems(launcher: LauncherConfig) -> Iterator[Problem]:
    for key, launchers in launcher.idle_keys().items():
        text = (
            f"is {getattr(launcher, key)!r} and has no effect with launcher={launcher.name}. Use it with "
            f"launcher={launchers}, or omit it."
        )
        yield Problem(f"launcher.{key}", text)


def layout_rule_problems(derived: DerivedConfig) -> list[Problem]:
    """Return the conflicts between layout, batch and model, for a config that is otherwise known to be valid."""
    config = derived.config
    batch: Rule = lambda: batch_problems(config.data, derived.data_parallel_ranks)  # noqa: E731
    return gather([*_layout_rules(derived), batch])


def _layout_rules(derived: DerivedConfig) -> list[Rule]:
    config = derived.config
    return [
        lambda: fit_problems(derived.fitted),
        *[partial(_axis_problems, axis, derived) for axis in AXES.every().values()],
        lambda: checkpointing_problems(config.parallel, config.model.num_layers),
        lambda: _shard_problems(config, derived.likely_degrees),
        lambda: _update_problems(config, derived.likely_degrees),
        lambda: _native_problems(derived),
        lambda: parameter_gather_problems(derived),
        lambda: gradient_reduction_problems(derived),
        lambda: weight_cast_problems(derived),
        lambda: _compiler_problems(config, derived.likely_degrees),
    ]


def _axis_problems(axis: MeshAxis, derived: DerivedConfig) -> list[Problem]:
    problems = list(axis.layout_problems(derived.config, derived.likely_degrees, derived.degrees is not None))
    return problems if derived.degrees is None else [*problems, *axis.machine_problems(derived.config, derived.degrees)]


def _shard_problems(config: Config, degrees: Degrees) -> list[Problem]:
    return [] if shape_problems(config.model) else list(sharding_problems(config, degrees))


def _logger_problems(config: Config) -> list[Problem]:
    name = config.logger.name
    if name not in ("tensorboard", "wandb") or find_spec(name) is not None:
        return []
    text = f"is {name}, which is not installed. Run pip install 'lightning-llm[{name}]', or use logger=csv."
    return [Problem("logger", text)]


def _length_problems(config: Config) -> list[Problem]:
    longest = config.model.max_sequence_length
    if config.data.sequence_length <= longest:
        return []
    text = f"must be at most model.max_sequence_length={longest}. Lower it."
    return [Problem("data.sequence_length", text, config.data.sequence_length)]


def _schedule_problems(config: Config) -> list[Problem]:
    schedule, total = config.schedule, config.schedule.total_steps
    problems = list(_floor_problems(config))
    if schedule.name != "constant" and total is not None and schedule.warmup_steps >= total:
        text = f"must be below schedule.total_steps={total}. Lower it."
        problems.append(Problem("schedule.warmup_steps", text, schedule.warmup_steps))
    return problems


def _floor_problems(config: Config) -> Iterator[Problem]:
    schedule, floor = config.schedule, config.schedule.final_learning_rate
    if floor is None:
        if schedule.final_factor is None:
            text = "is null, and so is schedule.final_learning_rate. Give one of them."
            yield Problem("schedule.final_factor", text)
        return
    if schedule.final_factor is not None:
        text = (
            f"is {floor:g}, and schedule.final_factor={schedule.final_factor:g} sets a floor, too. "
            "Give one of them, and set the other to null."
        )
        yield Problem("schedule.final_learning_rate", text)
    peak = schedule.peak * config.optim.learning_rate
    if floor > peak:
        of = f"optim.learning_rate={config.optim.learning_rate:g}"
        of += f" times schedule.peak_factor={schedule.peak_factor:g}" if schedule.peak_factor is not None else ""
        yield Problem("schedule.final_learning_rate", f"must be at most the peak, {of}. Lower it.", f"{floor:g}")


def _precision_problems(config: Config) -> list[Problem]:
    recipe, problems = config.precision, []
    if (recipe.master_dtype, recipe.main_grad_dtype) not in (("fp32", "fp32"), ("bf16", "bf16")):
        text = f"must equal master_dtype={recipe.master_dtype}. Set both to the same."
        problems.append(Problem("precision.main_grad_dtype", text, recipe.main_grad_dtype))
    if recipe.reduce_dtype != recipe.main_grad_dtype:
        text = (
            f"must equal main_grad_dtype={recipe.main_grad_dtype}. One tree sums gradients over micro-batches and "
            "ranks, so that bits do not depend on the ranks. Set both to the same."
        )
        problems.append(Problem("precision.reduce_dtype", text, recipe.reduce_dtype))
    problems += _wgrad_problems(recipe)
    if recipe.update.rounding != "even" and not config.optim.rounds_weights:
        text = f"optim={config.optim.name} rounds weights to nearest. Set even, or choose adamw, adamw8bit or muon."
        problems.append(Problem("precision.update.rounding", text, recipe.update.rounding))
    problems += _frozen_problems(config)
    experts = experts_by_linear(config.model)
    reasons = reasons_to_stay_unquantized(linear_names(config.model), recipe, config.model.num_layers, experts)
    if nothing := nothing_converted(recipe, reasons):
        problems += [*nothing, *other_modules(recipe, reasons, experts)]
    else:
        problems += unmatched(recipe, reasons, config.model.num_layers, experts)
        problems += _phase_module_problems(config, list(reasons), problems)
    return problems


def _frozen_problems(config: Config) -> Iterator[Problem]:
    """Yield that parameters which no gradient moves would be too coarse for their updates."""
    if config.precision.master_dtype == "fp32":
        return
    names = [name for index in range(config.model.num_layers) for name in frozen_names(config.model, index)]
    if names:
        text = f"is {config.precision.master_dtype}, and {names[0]} moves by less than it can show. Set it to fp32, "
        text += "or bias_update_rate to null."
        yield Problem("precision.master_dtype", text)


def _phase_module_problems(config: Config, linears: list[str], known: list[Problem]) -> Iterator[Problem]:
    """Yield the problems of the phases' `modules`, except those inherited from the recipe's own (`known`)."""
    recipe, found = config.precision, {(each.key, each.text) for each in known}
    for number, phase in enumerate(recipe.phases):
        if phase.modules is not None:
            experts = experts_by_linear(config.model)
            for each in unmatched(recipe.in_phase(number), linears, config.model.num_layers, experts):
                if (each.key, each.text) not in found:
                    key = each.key.removeprefix("precision.")
                    yield Problem(f"precision.phases.{number}.{key}", each.text)


def _wgrad_problems(recipe: PrecisionConfig) -> Iterator[Problem]:
    """Yield why `wgrad_dtype` would have no effect."""
    if recipe.wgrad_dtype is None:
        return
    text = f"is {recipe.wgrad_dtype}, and "
    if recipe.compute_dtype == recipe.wgrad_dtype:
        text += "so is compute_dtype, so nothing is rounded anyway. Set null, or compute in bf16 or fp16."
        yield Problem("precision.wgrad_dtype", text)
    elif recipe.main_grad_dtype != recipe.wgrad_dtype:
        text += f"gradients accumulate in main_grad_dtype={recipe.main_grad_dtype}, which rounds them. Set null, or "
        text += "main_grad_dtype, reduce_dtype and master_dtype to fp32."
        yield Problem("precision.wgrad_dtype", text)


def _update_problems(config: Config, degrees: Degrees) -> list[Problem]:
    """Return the problem of a pipeline with delayed scales that are updated after every micro-batch."""
    if degrees.pp == 1 or not config.precision.updates_every_micro_batch:
        return []
    text = (
        f"is {degrees.pp}, and the recipe updates delayed scales after every micro-batch (update: micro_batch). "
        "A stage runs later micro-batches' forward passes before an earlier one's backward pass, so "
        "scales would depend on the schedule. Set 1, or update: step."
    )
    return [Problem("parallel.pp", text)]


def _native_problems(derived: DerivedConfig) -> list[Problem]:
    """Return why `precision.backend=native` is not possible on this machine. Only for runs that start here.

    A plan shows the refusal instead.
    """
    config = derived.config
    recipe = config.precision
    if not (recipe.quantizes and recipe.backend == "native" and derived.to_train):
        return []
    return derived.decision.refusals()


def _compiler_problems(config: Config, degrees: Degrees) -> list[Problem]:
    if not config.parallel.compile:
        return []
    if (reason := compiler_failure(config.parallel, degrees)) is None:
        return []
    remedy = "parallel.activation_checkpoint=selective or none, or parallel.compile=false"
    return [Problem("parallel.compile", f"is true, but {reason}. Set {remedy}.")]


def evaluation_problems(config: Config, degrees: Degrees | None) -> Iterator[Problem]:
    """Yield the problems of each callback that evaluates during training."""
    for name, node in config.callbacks.items():
        if not node or node.get("_target_") != EVALUATE:
            continue
        key = f"callbacks.{name}"
        every, limit = node.get("every_steps"), node.get("limit")
        if isinstance(every, int) and every < 1:
            yield Problem(f"{key}.every_steps", "must be at least 1.", every)
        if isinstance(limit, int | float) and not (0 < limit < 1 or (limit >= 1 and limit % 1 == 0)):
            yield Problem(f"{key}.limit", "must be a number of samples, or a share of them between 0 and 1.", limit)
        if isinstance(size := node.get("batch_size"), int) and size < 1:
            yield Problem(f"{key}.batch_size", "must be at least 1.", size)
        yield from _nothing_to_evaluate(config, key, node)
        if tasks := node.get("tasks"):
            yield from _unknown_tasks(f"{key}.tasks", [str(each) for each in tasks])
            yield from task_problems(config, degrees) if degrees is not None else []


def _nothing_to_evaluate(config: Config, key: str, node: dict[str, object]) -> Iterator[Problem]:
    validates = node.get("validation", True)
    if validates and not config.data.validation.fraction and not config.data.watched:
        text = "is true, and data.validation.fraction=0 holds out nothing to validate on. Raise it, or set it to false."
        yield Problem(f"{key}.validation", text)
    if not validates and not node.get("tasks"):
        yield Problem(key, "evaluates nothing: validation=false and no tasks. Name tasks, or remove the callback.")


def _unknown_tasks(key: str, tasks: list[str]) -> Iterator[Problem]:
    files = [Path(each).expanduser() for each in tasks if each.endswith((".yaml", ".yml"))]
    yield from (Problem(key, f"{file} is not a file.") for file in files if not file.is_file())
    if find_spec("lm_eval") is None:
        yield Problem(key, f"needs lm-eval, which is not installed: {INSTALL_EVALUATION}")


def task_problems(config: Config, degrees: Degrees) -> list[Problem]:
    """Return problems if the ranks that share a text cannot divide the tokens of the longest one equally."""
    length = config.model.max_sequence_length
    shares = (2 * degrees.sequence if degrees.sequence > 1 else 1) * (
        degrees.width if config.parallel.sequence_parallel else 1
    )
    if length % shares == 0:
        return []
    text = f"is {length}, not a multiple of the {shares} parts of a text shared by ranks. Change parallel.cp or tp."
    return [Problem("model.max_sequence_length", text)]
