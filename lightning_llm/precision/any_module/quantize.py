"""Put the casts of a precision recipe into any module, in place: `quantize`; `dequantize` removes them."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError
from torch import Tensor, nn

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.config.derived_keys import fill_named_casts
from lightning_llm.config.recipes import ENDING, OTHER_ENDING, option_files
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.config.schema.validation import problem_of
from lightning_llm.config.yaml_file import read_mapping
from lightning_llm.precision.any_module.choice import Choice, choose
from lightning_llm.precision.any_module.clock import StepClock
from lightning_llm.precision.any_module.report import ModuleReport, QuantizeReport, stepped
from lightning_llm.precision.any_module.selection import FoundLinear, unwrapped
from lightning_llm.precision.linear.module import QuantizedLinear, quantized_layers
from lightning_llm.precision.linear.plan import LinearPlan
from lightning_llm.precision.linear.swap import choose_backend, sum_in_fp32
from lightning_llm.precision.lint import lint
from lightning_llm.precision.module_rules import rule_in_effect
from lightning_llm.precision.native.decide import Capability, Decision, capability_here, decide
from lightning_llm.precision.native.transformer_engine import NativeLinear

RecipeSource = str | os.PathLike[str] | Mapping[str, Any] | PrecisionConfig
"""Name of a shipped recipe, path of a YAML file, keys of a recipe, or a recipe."""
RECIPE_KEY = "recipe"
"""Key of messages about the argument `recipe`."""


def quantize(
    module: nn.Module,
    recipe: RecipeSource,
    *,
    keep: str | Iterable[str] = (),
    blocks: str | Sequence[str] | None = None,
    optimizer: Any = None,
    seed: int = 0,
    max_steps: int | None = None,
    micro_batches: int | None = None,
    device: str | torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    dry_run: bool = False,
) -> QuantizeReport:
    """Apply a precision recipe to the linear layers of `module`, in place, for any training loop.

    Layers stay the same objects, with the same parameters, names and dtypes: optimizers, wrappers and state dicts are
    not affected. Operands are cast from the dtype of the layer's input (under autocast, its dtype), in which the result
    is returned. Random bits are functions of (seed, step, micro-batch, layer name), equal to those of `train`.

    A step ends with `optimizer.step()`, a micro-batch with its backward pass.

    Args:
        module: a model, alone or in DistributedDataParallel, FSDP2 or torch.compile, before or after these.
        recipe: name of a shipped recipe ("mxfp8"), path of a YAML file, mapping of its keys, or a `PrecisionConfig`.
        keep: globs of module names that stay unquantized: "lm_head", "layers.0.*". They match whole names, endings that
            begin after a dot, and everything below a matching module.
        blocks: path of the container of the blocks, or several in order. Default: the longest ModuleList.
        optimizer: ends each step; of several, the last to step. Default: the first to step a parameter of `module`,
            unless the loop calls `report.step(n, micro_batch=i)`.
        seed: seed of the random bits.
        max_steps: length of the training, which a recipe with `phases` needs.
        micro_batches: micro-batches of each rank in a step, for the random bits of `train` under DDP (or ZeRO-1): rank
            r then has numbers r * micro_batches and following. Default: the i-th of rank r among R ranks has number
            i * R + r, as in `train` under FSDP2.
        device: device that the module will be moved to. Default: that of its parameters.
        group: ranks with different data. Default: the group of DistributedDataParallel, else all ranks.
        dry_run: change nothing and return the report.

    Returns:
        The report. Printed, it is a table of quantized and skipped layers with reasons.

    Raises:
        ConfigError: an argument is wrong, the recipe cannot be applied, no layer would be quantized, or layers of the
            module are quantized already.
    """
    kept = [keep] if isinstance(keep, str) or not isinstance(keep, Iterable) else list(keep)
    _check_arguments(module, kept, blocks, group, {"max_steps": max_steps, "micro_batches": micro_batches}, seed)
    root, read = unwrapped(module), read_recipe(recipe)
    hooked = None if optimizer is None else stepped(optimizer)
    choice = choose(root, read, kept, blocks, max_steps)
    where = _device(choice.quantized, device)
    how = _how(choice, where)
    clock = None
    if not dry_run:
        _convert(choice, how)
        group = getattr(module, "process_group", None) if group is None else group
        clock = StepClock(choice.recipe, choice.blocks.count, seed, max_steps, group, micro_batches)
        root.register_forward_pre_hook(clock.before_forward)
        root.register_forward_hook(clock.after_forward)
        clock.start(root)
        if hooked is not None:
            clock.attach(hooked)
    notes = _notes(choice, how) + _on_optimizer(hooked, root)
    return QuantizeReport(read, _rows(choice, how), choice.blocks.text, notes, clock)


def dequantize(module: nn.Module) -> list[str]:
    """Remove all casts that `quantize` put into `module`, in place; return the names of the layers.

    Raises:
        ConfigError: no layer of the module is quantized, or `train` built it.
    """
    layers = quantized_layers(module)
    if not layers:
        raise ConfigError(Problem("module", "has no quantized layer. Call quantize(module, recipe) first."))
    if built := [layer.name for layer in layers if not layer.is_adopted]:
        text = f"was built with quantized layers by `train`, which quantize did not convert: {', '.join(built)}."
        raise ConfigError(Problem("module", text))
    names, clocks = [layer.name for layer in layers], {layer.clock for layer in layers}
    for layer in layers:
        for number in [each for each, hook in layer._forward_pre_hooks.items() if hook is _keeps_off_fast_path]:
            del layer._forward_pre_hooks[number]
        layer.release()
    for clock in clocks:
        if isinstance(clock, StepClock) and clock.module is not None and not quantized_layers(clock.module):
            clock.stop()
    return names


def _check_arguments(module: Any, keep: Any, blocks: Any, group: Any, counts: Mapping[str, Any], seed: Any) -> None:
    problems = []
    if not isinstance(module, nn.Module):
        problems.append(Problem("module", f"must be a torch.nn.Module, not of type {type(module).__name__}."))
    for key, value in (("keep", keep), ("blocks", [] if blocks is None or isinstance(blocks, str) else blocks)):
        if not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
            problems.append(Problem(key, 'must be names of modules, such as "layers" or ["lm_head"].', repr(value)))
    if group is not None and not isinstance(group, dist.ProcessGroup):
        text = (
            f"must be a torch.distributed.ProcessGroup, such as mesh.get_group(), not of type {type(group).__name__}."
        )
        problems.append(Problem("group", text))
    given = [("seed", seed, 0), *((key, each, 1) for key, each in counts.items() if each is not None)]
    for key, value, lowest in given:
        if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
            problems.append(Problem(key, f"must be an integer of at least {lowest}.", repr(value)))
    if problems:
        raise ConfigError(problems)
    if found := quantized_layers(module):
        first = found[0].name or "the module itself"
        text = f"has {len(found)} quantized layers already ({first}, ...). Call dequantize(module) first."
        raise ConfigError(Problem("module", text))


@dataclass(frozen=True)
class _How:
    """How casts run: `decision` on native kernels, `backend` and `note` of emulated casts."""

    decision: Decision
    backend: Any
    note: str | None


def _device(quantized: Sequence[FoundLinear], wanted: str | torch.device | None) -> torch.device:
    if wanted is not None:
        try:
            return torch.device(wanted)
        except (RuntimeError, TypeError) as error:
            raise ConfigError(Problem("device", 'must be a device of torch, such as "cuda".', repr(wanted))) from error
    device: torch.device = quantized[0].module.weight.device
    if device.type != "meta":
        return device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _how(choice: Choice, device: torch.device) -> _How:
    """Decide as `train` does. Raises ConfigError for `backend: native` where that is impossible."""
    recipe, here = choice.recipe, capability_here("auto")
    if device.type != "cuda" and here.compute_capability is not None:
        here = Capability.none(f"the parameters are on {device}; move the module first, or pass device='cuda'")
    decision = decide(recipe, here, choice.widths)
    if decision.runs == "refused":
        raise ConfigError(decision.refusals())
    sum_in_fp32()
    if decision.runs == "native":
        from lightning_llm.precision.native.codes import check_native_casts

        bias = any(linear.module.bias is not None for linear in choice.quantized)
        return _How(decision, "eager", check_native_casts(recipe, device, bias))
    return _How(decision, *choose_backend(recipe, device.type))


def _convert(choice: Choice, how: _How) -> None:
    first, kind = choice.recipe.at(0, 1), NativeLinear if how.decision.runs == "native" else QuantizedLinear
    for linear in choice.quantized:
        place = choice.places[linear.name]
        plan = LinearPlan.from_recipe(first, how.backend, rule_in_effect(place, first, choice.blocks.count))
        its_kind = WITH_TRANSPOSED_WEIGHT[kind] if linear.is_transposed else kind
        layer = its_kind.adopt(linear.module, linear.name, place, plan)
        if linear.name in choice.on_fast_paths:
            layer.register_forward_pre_hook(_keeps_off_fast_path)
        if how.decision.runs == "native":  # FSDP2 may gather the weights, now or once `fully_shard` is called
            vars(layer)["sharded"] = dist.is_available() and dist.is_initialized()


def _keeps_off_fast_path(*_: Any) -> None:
    """Do nothing: with a hook, nn.TransformerEncoderLayer calls its layers instead of reading their weights."""


def _rows(choice: Choice, how: _How) -> tuple[ModuleReport, ...]:
    rows = []
    for linear in choice.linears:
        why = choice.reasons[linear.name]
        if why is None:
            rows.append(ModuleReport(linear.name, True, how.decision.reason, _runs(how), linear.names))
        else:
            rows.append(ModuleReport(linear.name, False, why, "", linear.names))
    return tuple(rows)


def _runs(how: _How) -> Any:
    return "native" if how.decision.runs == "native" else "emulated"


def _on_optimizer(optimizer: torch.optim.Optimizer | None, root: nn.Module) -> tuple[str, ...]:
    """Return a note on an optimizer of other parameters, such as fp32 copies: its steps count all the same."""
    if optimizer is None:
        return ()
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    if any(id(each) in held for each in root.parameters()):
        return ()
    return ("the optimizer has no parameter of the module: check that its steps are those of this training",)


def _notes(choice: Choice, how: _How) -> tuple[str, ...]:
    """Return the notes: how emulated casts run, and the keys of the recipe that the training loop must apply."""
    recipe, notes = choice.recipe, [] if how.note is None else [how.note]
    if not choice.ends_apply:
        notes.append("the recipe's rules for the first and last blocks do not apply: there are no blocks")
    if recipe.loss_scaling is not None:
        notes.append("the recipe scales the loss, which the training loop does: use torch.amp.GradScaler")
    hints = recipe.optimizer.model_dump(exclude_none=True)
    if hints:
        named = ", ".join(f"{key}={value:g}" for key, value in hints.items())
        notes.append(f"the recipe sets the optimizer's {named}, which the training loop does")
    if recipe.update.rounding != "even":
        notes.append(f"the recipe rounds updated weights by {recipe.update.rounding}, which the optimizer must do")
    if recipe.gradient_reduction is not None:
        notes.append("the recipe sends gradients between ranks as codes, which the training loop does")
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16}[recipe.master_dtype]
    others = {linear.module.weight.dtype for linear in choice.quantized} - {wanted}
    if others:
        found = ", ".join(sorted(str(each).removeprefix("torch.") for each in others))
        notes.append(f"weights are {found}; the recipe has master weights in {recipe.master_dtype}")
    if choice.other_matrices:
        notes.append(f"not quantized, since no linear layer holds them: {', '.join(choice.other_matrices)}")
    return tuple(notes)


class QuantizedConv1D(QuantizedLinear):
    """`QuantizedLinear` made from a Conv1D of transformers (`adopt`): its weight is [in_features, out_features]."""

    @property
    def matrix(self) -> Tensor:
        """The weight as [out_features, in_features]."""
        return self.weight.t()

    def extra_repr(self) -> str:
        inputs, outputs = self.weight.shape
        return f"in_features={inputs}, out_features={outputs}, {self.casts_text()}"


class NativeConv1D(NativeLinear):
    """`NativeLinear` made from a Conv1D of transformers; kernels get a contiguous transposed copy of the weight."""

    @property
    def matrix(self) -> Tensor:
        """The weight as [out_features, in_features]."""
        return self.weight.t().contiguous()

    def extra_repr(self) -> str:
        return QuantizedConv1D.extra_repr(self)  # type: ignore[arg-type]


WITH_TRANSPOSED_WEIGHT: dict[type[QuantizedLinear], type[QuantizedLinear]] = {
    QuantizedLinear: QuantizedConv1D,
    NativeLinear: NativeConv1D,
}
"""The class for Conv1D by the class for nn.Linear."""


def read_recipe(source: RecipeSource) -> PrecisionConfig:
    """Read and validate a precision recipe given by name, file, mapping or object.

    Raises:
        ConfigError: there is no such recipe or file, or with all problems of its keys, including those of lint rules.
    """
    recipe = source if isinstance(source, PrecisionConfig) else _validated(*_recipe_values(source))
    if problems := lint(recipe):
        raise ConfigError(problems)
    return recipe


def _recipe_values(source: Any) -> tuple[dict[str, Any], str]:
    """Return the keys that `source` has, and the recipe's name if they have none."""
    if isinstance(source, Mapping):
        return dict(OmegaConf.to_container(source)) if isinstance(source, DictConfig) else dict(source), "mapping"  # type: ignore[arg-type]
    if not isinstance(source, str | os.PathLike):
        text = f"is of type {type(source).__name__}. Give a recipe's name, a YAML file, a mapping or a PrecisionConfig."
        raise ConfigError(Problem(RECIPE_KEY, text))
    name, shipped = os.fspath(source), option_files("precision")
    if name in shipped:
        return _resolved(read_mapping(Path(str(shipped[name])), RECIPE_KEY)), name
    if not name.endswith((ENDING, OTHER_ENDING)) and os.sep not in name:
        text = f"there is no such precision recipe.{did_you_mean(name, shipped)} Or give the path of a YAML file."
        raise ConfigError(Problem(RECIPE_KEY, text, name))
    wanted = "Give a YAML file with the keys of a recipe."
    return _resolved(read_mapping(Path(name).expanduser(), RECIPE_KEY, wanted)), Path(name).stem


def _resolved(tree: DictConfig) -> dict[str, Any]:
    try:
        values: Any = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(Problem(RECIPE_KEY, f"{str(error).splitlines()[0]}.")) from error
    return dict(values)


def _validated(values: dict[str, Any], name: str) -> PrecisionConfig:
    values = {"name": name, **values}
    try:
        return PrecisionConfig.model_validate(_with_named_casts(values))
    except ValidationError as error:
        found = [problem_of(details | {"loc": ("precision", *details["loc"])}) for details in error.errors()]
        raise ConfigError(found) from error


def _with_named_casts(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` with the slots of the recipes that rules of `modules.casts` name."""
    modules = values.get("modules")
    if not isinstance(modules, Mapping) or not modules.get("casts"):
        return values
    try:
        tree = OmegaConf.create({"precision": values})
    except OmegaConfBaseException as error:
        text = f"has a value that no YAML file can have: {str(error).splitlines()[0]}. Write it as text."
        raise ConfigError(Problem(RECIPE_KEY, text)) from error
    fill_named_casts(tree, lambda name: OmegaConf.create(_recipe_values(name)[0]), None)
    return dict(OmegaConf.to_container(tree.precision))  # type: ignore[arg-type]
