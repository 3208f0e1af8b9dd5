"""`Plan`: a config with everything derived from it, each part computed once. Imports no torch."""

from dataclasses import dataclass
from functools import cached_property

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.config_hash import config_hash
from lightning_llm.config.schema import Config, ParallelConfig
from lightning_llm.config.schema.model import DEFAULT_LAYERS, ModelConfig
from lightning_llm.model.structure import block_parts, experts_by_linear, linear_names, linear_widths
from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.degrees import Degrees, given_degrees, resolve_degrees
from lightning_llm.plan.divisibility import part_widths
from lightning_llm.plan.memory.units import micro_batches_per_rank
from lightning_llm.plan.nodes import with_reduction
from lightning_llm.precision.module_rules import Coverage, coverage
from lightning_llm.precision.native.decide import (
    HARDWARE,
    Capability,
    Decision,
    Matrix,
    capability_here,
    decide,
    decision_matrix,
    device_here,
    shipped_recipes,
)


def compiles(config: Config, degrees: Degrees, capability: Capability) -> bool:
    """Return whether blocks are compiled on the device of `capability`; if `parallel.compile` is null: only on CUDA.

    The config keeps its null, so the choice is not part of the config hash. It is recorded in the run's summary as
    `compiled`, which `compare` reads.
    """
    if config.parallel.compile is not None:
        return config.parallel.compile
    return capability.compute_capability is not None and why_not(config, degrees, capability) is None


def compile_note(config: Config, degrees: Degrees, capability: Capability) -> str | None:
    """Return a note with the reason if blocks on a GPU cannot be compiled and `parallel.compile` is null; else None."""
    if config.parallel.compile is not None or capability.compute_capability is None:
        return None
    reason = why_not(config, degrees, capability)
    return reason and f"note   blocks run operator by operator, not compiled as on CUDA by default: {reason}"


def why_not(config: Config, degrees: Degrees, capability: Capability) -> str | None:
    """Return why blocks are not compiled by default on the device of `capability`; None without a known reason."""
    return capability.no_compiler or compiled_on_request(config.model) or compiler_failure(config.parallel, degrees)


def compiled_on_request(model: ModelConfig) -> str | None:
    """Return why the model's blocks are compiled only under `parallel.compile=true`; None if by default on CUDA too."""
    for index in range(len(model.layers or DEFAULT_LAYERS)):
        for part in block_parts(model, index).values():
            if part.why_compiled_on_request is not None:
                return f"in block '{model.layer_name(index)}', {part.why_compiled_on_request}"
    return None


def compiler_failure(parallel: ParallelConfig, degrees: Degrees) -> str | None:
    """Return why torch's compiler fails: it cannot compile fully recomputed blocks under cp and tp together.

    The compiler takes a device mesh for one of the tensors that such a block saves (torch 2.13: "expected all
    tensors_saved_with_vc_check to be Tensors").
    """
    modes = parallel.activation_checkpoint_layers or (parallel.activation_checkpoint,)
    if "full" not in modes or degrees.sequence == 1 or degrees.width == 1:
        return None
    return (
        f"torch's compiler fails on fully recomputed blocks under cp={degrees.sequence} and tp={degrees.width} together"
    )


@dataclass(frozen=True)
class Plan:
    """Resolved plan of a run: `config` without open choices, degrees, `micro_batches` per rank and step.

    `decision` (native or emulated casts) is for the device `capability`: this machine's for training,
    `hardware` of the config when planning for another machine.
    """

    config: Config
    degrees: Degrees
    micro_batches: int
    capability: Capability
    decision: Decision

    @cached_property
    def identity(self) -> str:
        """The config's hash."""
        return config_hash(self.config)

    @cached_property
    def compiled(self) -> bool:
        """Whether blocks are compiled."""
        return compiles(self.config, self.degrees, self.capability)

    @property
    def parallel(self) -> ParallelConfig:
        """The config's `parallel`, with `compile` resolved for the plan's device."""
        return self.config.parallel.model_copy(update={"compile": self.compiled})


class DerivedConfig:
    """Values derived from a config, computed lazily and cached.

    On the valid part of a config (`config.schema.validation`), reading a missing key raises `BrokenKeyError`.

    Args:
        device: device that the casts run on; None: this machine's if `to_train` or without
                `config.planned_hardware`, else that hardware.
        to_train: whether the run starts on this machine.
    """

    def __init__(self, config: Config, device: Capability | None = None, *, to_train: bool = False):
        self.config = config
        self.to_train = to_train
        self._device = device

    @cached_property
    def world(self) -> int:
        """Total number of ranks."""
        return self.config.world or self.config.trainer.devices

    @cached_property
    def fitted(self) -> Degrees | ConfigError:
        """The degrees on `world` ranks, or the error of resolving them."""
        try:
            return resolve_degrees(self.config.parallel, self.world)
        except ConfigError as error:
            return error

    @property
    def degrees(self) -> Degrees | None:
        """The degrees; None if they do not fit `world` ranks."""
        return self.fitted if isinstance(self.fitted, Degrees) else None

    @property
    def likely_degrees(self) -> Degrees:
        """The degrees; if they do not fit `world` ranks, those of the config."""
        return self.degrees or given_degrees(self.config.parallel)

    @property
    def data_parallel_ranks(self) -> int:
        """Data-parallel ranks; 1 if the degrees do not fit `world` ranks."""
        return self.degrees.dp if self.degrees else 1

    @cached_property
    def capability(self) -> Capability:
        """Device and libraries that decide which casts run natively: a GPU or CPU, of this machine or planned for."""
        if self._device is not None:
            return self._device
        if self.config.planned_hardware is not None and not self.to_train:
            return HARDWARE[self.config.planned_hardware]
        # Importing Transformer Engine takes seconds, so it is skipped for recipes that do not quantize.
        look = capability_here if self.config.precision.quantizes else device_here
        return look(self.config.trainer.accelerator)

    @cached_property
    def decision(self) -> Decision:
        """Whether the recipe's quantised GEMMs run natively on `capability`."""
        model = self.config.model
        widths = linear_widths(model) | part_widths(model, self.likely_degrees.width)
        return decide(self.config.precision, self.capability, widths, self._shared_axes())

    def plan(self) -> Plan:
        """Return the plan of a complete config.

        Raises:
            ConfigError: the degrees do not multiply to the world.
        """
        if not isinstance(self.fitted, Degrees):
            raise self.fitted
        config = with_reduction(self.config, self.fitted)
        micro_batches = micro_batches_per_rank(config, self.fitted)
        return Plan(config, self.fitted, micro_batches, self.capability, self.decision)

    def _shared_axes(self) -> dict[str, str]:
        """Return {key: degree as text} of the axes above 1 that split a linear's tensors."""
        given, degrees = self.config.parallel, self.likely_degrees
        axes = reversed(AXES.cutting("sequence", "width"))
        shared = {axis: size for axis in axes if (size := degrees.ranks(axis)) > 1}
        return {
            f"parallel.{axis}": f"{size}" if getattr(given, axis) else f"null, which is {size} of {self.world} ranks"
            for axis, size in shared.items()
        }


def plan_of(config: Config, device: Capability | None = None) -> Plan:
    """Return the plan of `config` without checking it, for `device` or the config's device.

    Raises:
        ConfigError: the degrees do not multiply to the world.
    """
    return DerivedConfig(config, device).plan()


def coverage_of(config: Config) -> Coverage | None:
    """Return how many linear layers and blocks of the model the precision recipe quantizes; None without casts."""
    model = config.model
    return coverage(config.precision, linear_names(model), model.num_layers, experts_by_linear(model))


def matrix_of(config: Config) -> Matrix:
    """Return the decisions for all shipped recipes and the config's own, at its model's sizes, with this machine."""
    recipes = shipped_recipes()
    if config.precision.name not in {recipe.name for recipe in recipes}:
        recipes.append(config.precision)
    return decision_matrix(recipes, linear_widths(config.model), capability_here(config.trainer.accelerator))
