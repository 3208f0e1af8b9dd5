"""`Plan`: a config with everything that follows from it, each part resolved once and handed down. Imports no torch."""

from dataclasses import dataclass
from functools import cached_property

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.config_hash import config_hash
from lightning_llm.config.schema import Config, ParallelConfig
from lightning_llm.model.structure import linear_names, linear_widths
from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.degrees import Degrees, given_degrees, resolve_degrees
from lightning_llm.plan.divisibility import part_widths
from lightning_llm.plan.memory.units import micro_batches_per_rank
from lightning_llm.plan.nodes import with_reduction
from lightning_llm.precision.native.capability import HARDWARE, Capability, capability_here, device_here
from lightning_llm.precision.native.decide import Decision, Matrix, decide, decision_matrix, shipped_recipes
from lightning_llm.precision.recipe.module_rules import Coverage, coverage


def compiles(parallel: ParallelConfig, degrees: Degrees, capability: Capability) -> bool:
    """Return whether blocks are compiled on the device of `capability`: where `parallel.compile` is null, on CUDA.

    The config keeps its null: what came of it is a fact of the run (`compiled` in its summary), which `compare` looks
    at, and no part of the config's hash.
    """
    if parallel.compile is not None:
        return parallel.compile
    return capability.compute_capability is not None and why_not(parallel, degrees, capability) is None


def compile_note(parallel: ParallelConfig, degrees: Degrees, capability: Capability) -> str | None:
    """Return why blocks run operator by operator on a GPU although nobody asked for that; None where they do not."""
    if parallel.compile is not None or capability.compute_capability is None:
        return None
    reason = why_not(parallel, degrees, capability)
    return reason and f"note   blocks run operator by operator, not compiled as on CUDA by default: {reason}"


def why_not(parallel: ParallelConfig, degrees: Degrees, capability: Capability) -> str | None:
    """Return why blocks cannot be compiled on the device of `capability`; None where nothing is known against it."""
    return capability.no_compiler or compiler_failure(parallel, degrees)


def compiler_failure(parallel: ParallelConfig, degrees: Degrees) -> str | None:
    """Return what torch's compiler fails at: blocks that cp and tp share and that are recomputed whole.

    It counts a mesh among the tensors that such a block keeps (torch 2.13: "expected all tensors_saved_with_vc_check to
    be Tensors").
    """
    modes = parallel.activation_checkpoint_layers or (parallel.activation_checkpoint,)
    if "full" not in modes or degrees.sequence == 1 or degrees.width == 1:
        return None
    return (
        f"torch's compiler fails at blocks that are recomputed whole under "
        f"cp={degrees.sequence} and tp={degrees.width} together"
    )


@dataclass(frozen=True)
class Plan:
    """One run before it starts. `config` has every choice made, `micro_batches` are those of a rank and step.

    `capability` is the device that `decision` (native or emulated casts) was made for: this machine's where the run is
    to train, the config's `hardware` where it is planned for another.
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
        return compiles(self.config.parallel, self.degrees, self.capability)

    @property
    def parallel(self) -> ParallelConfig:
        """The layout's keys, `compile` as it is on the plan's device."""
        return self.config.parallel.model_copy(update={"compile": self.compiled})


class Resolution:
    """What follows from a config, found when it is asked for and kept.

    Of a config that lacks wrong keys (`config.schema.strict`), whatever reads one is a `BrokenKeyError`.

    Args:
        device: what casts are to run on; None: this machine's where the run is to train, else `config.hardware`'s.
        to_train: whether the run is to start on this machine.
    """

    def __init__(self, config: Config, device: Capability | None = None, *, to_train: bool = False):
        self.config = config
        self.to_train = to_train
        self._device = device

    @cached_property
    def world(self) -> int:
        """Ranks in all."""
        return self.config.world or self.config.trainer.devices

    @cached_property
    def fitted(self) -> Degrees | ConfigError:
        """The degrees on `world` ranks, or why there are none."""
        try:
            return resolve_degrees(self.config.parallel, self.world)
        except ConfigError as error:
            return error

    @property
    def degrees(self) -> Degrees | None:
        """The degrees, None where they do not fit `world` ranks."""
        return self.fitted if isinstance(self.fitted, Degrees) else None

    @property
    def likely_degrees(self) -> Degrees:
        """The degrees; where they do not fit, those given: what holds whatever the number of ranks."""
        return self.degrees or given_degrees(self.config.parallel)

    @property
    def data_parallel_ranks(self) -> int:
        """Ranks that train on different data; 1 where the degrees do not fit."""
        return self.degrees.dp if self.degrees else 1

    @cached_property
    def capability(self) -> Capability:
        """The device that casts are to run on."""
        if self._device is not None:
            return self._device
        if self.config.planned_hardware is not None and not self.to_train:
            return HARDWARE[self.config.planned_hardware]
        # Transformer Engine is imported to see whether it can be, which takes seconds: not for bf16.
        look = capability_here if self.config.precision.quantises else device_here
        return look(self.config.trainer.accelerator)

    @cached_property
    def decision(self) -> Decision:
        """Whether the recipe's quantised GEMMs run natively on `capability`."""
        model = self.config.model
        widths = linear_widths(model) | part_widths(model, self.likely_degrees.width)
        return decide(self.config.precision, self.capability, widths, self._shared_axes())

    def plan(self) -> Plan:
        """Return the plan of a config that is whole.

        Raises:
            ConfigError: the degrees do not multiply to the world.
        """
        if not isinstance(self.fitted, Degrees):
            raise self.fitted
        config = with_reduction(self.config, self.fitted)
        micro_batches = micro_batches_per_rank(config, self.fitted)
        return Plan(config, self.fitted, micro_batches, self.capability, self.decision)

    def _shared_axes(self) -> dict[str, str]:
        """Return the axes whose ranks have a part of a linear's tensors or of the layers: degrees in words, by key."""
        given, degrees = self.config.parallel, self.likely_degrees
        axes = reversed(AXES.cutting("layers", "sequence", "width"))
        shared = {axis: size for axis in axes if (size := degrees.ranks(axis)) > 1}
        return {
            f"parallel.{axis}": f"{size}" if getattr(given, axis) else f"null, which is {size} of {self.world} ranks"
            for axis, size in shared.items()
        }


def plan_of(config: Config, device: Capability | None = None) -> Plan:
    """Return the plan of `config`, unchecked, for `device` or what the config names.

    Raises:
        ConfigError: the degrees do not multiply to the world.
    """
    return Resolution(config, device).plan()


def coverage_of(config: Config) -> Coverage | None:
    """Return the linear layers and blocks that `config.precision` quantizes in `config.model`; None without casts."""
    return coverage(config.precision, linear_names(config.model), config.model.num_layers)


def matrix_of(config: Config) -> Matrix:
    """Return the decisions for all shipped recipes and the config's own, at its model's sizes, with this machine."""
    recipes = shipped_recipes()
    if config.precision.name not in {recipe.name for recipe in recipes}:
        recipes.append(config.precision)
    return decision_matrix(recipes, linear_widths(config.model), capability_here(config.trainer.accelerator))
