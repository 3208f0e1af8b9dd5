"""Open one rank of a run: device, callbacks, layout, kernels, health check, and one plan on all ranks."""

import logging
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from hydra.utils import instantiate
from lightning.pytorch.callbacks import WeightAveraging

from lightning_llm.base.errors import AgreedError, ConfigError, Problem, UnhealthyError
from lightning_llm.base.host_memory import keep_memory
from lightning_llm.base.terminal import one_line
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.callbacks import refused
from lightning_llm.health.check import check_health
from lightning_llm.health.devices import SHORT
from lightning_llm.health.ranks import Ranks
from lightning_llm.linalg import DTYPES
from lightning_llm.model.attention.kernel_choice import AttentionShape, NoKernelError, kernel_of
from lightning_llm.model.attention.kinds import AttentionSpec
from lightning_llm.model.structure import experts_by_linear, has_bias
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.operand_shards import shared_parts
from lightning_llm.parallel.process_group import gather_objects, object_of_first, record_collectives
from lightning_llm.plan.attention_kernel import KEY, is_masked, mixers_of
from lightning_llm.plan.nodes import ranks_per_node
from lightning_llm.plan.resolve import Plan
from lightning_llm.precision.cast.inductor import no_compiler
from lightning_llm.precision.linear.swap import choose_backend
from lightning_llm.precision.native.codes import check_native_casts
from lightning_llm.precision.native.decide import Decision
from lightning_llm.run.launch.environment import print_once, rank_environment


@dataclass(frozen=True)
class Rank:
    """One opened rank of a run: everything that is checked before the run's folder is changed."""

    plan: Plan
    device: torch.device
    layout: Layout
    callbacks: Mapping[str, pl.Callback]
    """The config's callbacks by name."""
    attention: dict[str, str]
    """Name of the attention kernel by kind of block."""


def open_rank(plan: Plan) -> Rank:
    """Open this rank of `plan`: choose device and kernels, build callbacks, join the other ranks. Collective.

    Raises:
        ConfigError: on every rank, with the problems of all ranks; immediately if this rank has no device.
    """
    config = plan.config
    device = choose_device(config)
    if device.type == "cpu":
        keep_memory()
    if config.trainer.threads:
        torch.set_num_threads(config.trainer.threads)
    callbacks: Mapping[str, pl.Callback] = {}
    attention: dict[str, str] = {}
    refusal = None
    try:
        callbacks = build_callbacks(config)
        check_casts(config, plan.decision, device)
        check_compiler(config, device)
        attention = attention_kernels(plan, device)
    except ConfigError as error:
        refusal = error
    layout = open_layout(plan, device)
    plan = agree_on_plan(plan, refusal)
    check_casts_of_parts(plan, device, layout)
    record_collectives(device, Path(plan.config.run.dir))
    return Rank(plan, device, layout, callbacks, attention)


def choose_device(config: Config) -> torch.device:
    """Return the device of this rank: the CUDA device of its local rank, or the CPU.

    Raises:
        ConfigError: trainer.accelerator=cuda without a CUDA device, or fewer CUDA devices than ranks.
    """
    wanted, found = config.trainer.accelerator, torch.cuda.is_available()
    if wanted == "cuda" and not found:
        text = f"torch {torch.__version__} finds no CUDA device. Use auto or cpu."
        raise ConfigError(Problem("trainer.accelerator", text, "cuda"))
    if not found or wanted == "cpu":
        return torch.device("cpu")
    environment = rank_environment()
    if config.trainer.devices > torch.cuda.device_count():
        text = f"must be at most {torch.cuda.device_count()}, the CUDA devices of this machine. Lower it."
        raise ConfigError(Problem("trainer.devices", text, config.trainer.devices))
    device = torch.device("cuda", environment.local_rank if environment else 0)
    torch.cuda.set_device(device)
    return device


def build_callbacks(config: Config) -> dict[str, pl.Callback]:
    """Import and build the callbacks of the config; return them by name.

    Raises:
        ConfigError: with each target that cannot be imported or built, is not a callback, or conflicts with the
            strategy, and with callbacks that share a state key.
    """
    made: dict[str, pl.Callback] = {}
    problems = []
    for name, node in config.callbacks.items():
        if node is None:
            continue
        key = f"callbacks.{name}"
        try:
            callback = instantiate(node, _convert_="all")
        except (Exception, SystemExit) as error:  # an import or a constructor may raise anything
            cause = error.__cause__ or error
            if isinstance(cause, ConfigError):  # raised by a shipped callback, names the argument and the remedy
                problems += [replace(each, key=f"{key}.{each.key}") for each in cause.problems]
                continue
            why = f"{type(cause).__name__}: {one_line(str(cause)).rstrip('.')}"
            text = f"{node['_target_']} cannot be built: {why}. Fix its arguments or its code, or set {key}=null."
            problems.append(Problem(key, text))
            continue
        lineage = [f"{each.__module__}.{each.__qualname__}" for each in type(callback).__mro__]
        if problem := refused(node["_target_"], lineage):
            problems.append(Problem(f"{key}._target_", problem, node["_target_"]))
        made[name] = callback
    stateful = [each.state_key for each in made.values() if type(each).state_dict is not pl.Callback.state_dict]
    for key in sorted({each for each in stateful if stateful.count(each) > 1}):
        text = f"two callbacks have the state key '{key}'. Define a distinct state_key in their class."
        problems.append(Problem("callbacks", text))
    if sum(isinstance(each, WeightAveraging) for each in made.values()) > 1:
        text = "two callbacks average weights, but validation can use only one. Remove one of them."
        problems.append(Problem("callbacks", text))
    if problems:
        raise ConfigError(problems)
    return made


def check_casts(config: Config, decision: Decision, device: torch.device) -> None:
    """Raise ConfigError if the recipe's casts cannot run on `device`, or native casts differ from the recipe."""
    if decision.runs == "refused":  # this rank's machine may differ from the one that was checked
        raise ConfigError(decision.refusals())
    if decision.runs == "emulated":
        choose_backend(config.precision, device.type)
    elif decision.natives:
        experts = bool(experts_by_linear(config.model))
        unchecked = check_native_casts(config.precision, device, has_bias(config.model), experts=experts)
        if unchecked is not None:
            print_once(unchecked)


def check_casts_of_parts(plan: Plan, device: torch.device, layout: Layout) -> None:
    """Check native casts of tensors that are split over ranks, for recipes with one scale per tensor. Collective.

    Each rank casts its part with a scale of the whole tensor; the result must equal that part of the recipe's cast. For
    recipes without such scales `check_casts` is enough.

    Raises:
        AgreedError: on every rank, if the result differs on one.
    """
    config, parts = plan.config, shared_parts(layout)
    if not parts or not any(native.whole_tensors for native in plan.decision.natives):
        return
    found: tuple[Problem, ...] = ()
    try:
        check_native_casts(config.precision, device, has_bias(config.model), parts)
    except ConfigError as error:
        found = tuple(error.problems)
    if refused := problems_of_ranks(gather_objects(found)):
        raise AgreedError(refused)


def check_compiler(config: Config, device: torch.device) -> None:
    """Raise ConfigError if blocks are to be compiled and there is no compiler for `device`."""
    reason = no_compiler(device.type) if config.parallel.compile else None
    if reason is not None:
        text = f"{reason}. Fix this, or set parallel.compile=false."
        raise ConfigError(Problem("parallel.compile", text, "true"))


def open_layout(plan: Plan, device: torch.device) -> Layout:
    """Join this rank's process group and return its layout; a single rank that shards nothing joins none.
    Collective."""
    return Layout.joined(plan.parallel, plan.degrees, device, ranks_per_node(plan.config))


class RankReport(NamedTuple):
    """Facts of one rank that must be the same on all ranks, and its problems."""

    devices: int
    """Ranks per machine."""
    config_hash: str
    runs: str
    """Kind of casts that would run there: "native" or "emulated"."""
    compiled: bool
    """Whether blocks would be compiled."""
    problems: tuple[Problem, ...]
    """Reasons why this rank cannot train."""


def agree_on_plan(plan: Plan, refusal: ConfigError | None = None) -> Plan:
    """Verify that all ranks have the same plan; return it with rank 0's config. Collective.

    Ranks compose their configs separately, so default names, which contain a timestamp, may differ. `refusal`: the
    reason why this rank cannot train, None if it can.

    Raises:
        ConfigError: on every rank, with the problems of all ranks, or if ranks have different configs or would run
            casts differently.
    """
    if not dist.is_initialized():
        if refusal is not None:
            raise refusal
        return plan
    problems = () if refusal is None else tuple(refusal.problems)
    here = RankReport(plan.config.trainer.devices, plan.identity, plan.decision.runs, plan.compiled, problems)
    found = gather_objects(here)
    if refused := problems_of_ranks([each.problems for each in found]):
        raise AgreedError(refused)
    if len({each.devices for each in found}) > 1:
        devices = sorted({each.devices for each in found})
        text = f"ranks per machine differ: {', '.join(map(str, devices))}. Start the same number on each."
        raise AgreedError(Problem("trainer.devices", text))
    if others := [rank for rank, each in enumerate(found) if each.config_hash != found[0].config_hash]:
        text = f"rank(s) {listed(others)} differ from rank 0. Start all ranks with the same arguments."
        raise AgreedError(Problem("config", text))
    if others := [rank for rank, each in enumerate(found) if each.runs != found[0].runs]:
        text = (
            f"casts would be {found[0].runs} on rank 0 and {found[others[0]].runs} on rank(s) {listed(others)}. Use "
            "emulated, or start all ranks on identical machines."
        )
        raise AgreedError(Problem("precision.backend", text))
    if others := [rank for rank, each in enumerate(found) if each.compiled != found[0].compiled]:
        compiled, not_compiled = ("rank 0", f"rank(s) {listed(others)}")[:: 1 if found[0].compiled else -1]
        text = f"blocks would be compiled on {compiled}, but not on {not_compiled}. Set it to true or false."
        raise AgreedError(Problem("parallel.compile", text))
    return replace(plan, config=object_of_first(plan.config))


def problems_of_ranks(problems: list[tuple[Problem, ...]]) -> list[Problem]:
    """Return the distinct problems of all ranks, given by rank; each names its ranks unless all ranks have it."""
    found: dict[Problem, list[int]] = {}
    for rank, its in enumerate(problems):
        for each in dict.fromkeys(its):
            found.setdefault(each, []).append(rank)
    return [
        each if len(ranks) == len(problems) else replace(each, text=f"on rank(s) {listed(ranks)} {each.text}")
        for each, ranks in found.items()
    ]


def listed(ranks: list[int]) -> str:
    """Return the numbers of `ranks` as text: "1, 4, 5"."""
    return ", ".join(map(str, ranks))


def joined_ranks(config: Config) -> Ranks:
    """Return this run's ranks as a health check needs them; they have joined a process group already. Collective."""
    here = rank_environment()
    local_rank, local_world = (here.local_rank, here.local_world) if here else (0, 1)
    return Ranks(local_rank, local_world, config.parallel.timeout_seconds)


def refuse_unhealthy(ranks: Ranks, device: torch.device) -> str:
    """Run the short health check on all ranks; return its result as a line. Collective.

    Raises:
        UnhealthyError: on every rank, with each problem and its rank and machine.
    """
    start = time.perf_counter()
    report = check_health(ranks, device, SHORT[device.type])
    if device.type == "cuda":  # release the memory of the check
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if faults := [*report.wrong, *report.slow_lines()]:
        raise UnhealthyError(f"trainer.health: {'; '.join(faults)}", reports=ranks.rank == 0)
    seconds = time.perf_counter() - start
    return f"health {ranks.world} rank{'s' if ranks.world > 1 else ''}: results correct, no slow rank ({seconds:.1f} s)"


def quiet_lightning() -> None:
    """Hide Lightning's hints about settings that are chosen here on purpose, and a warning of FSDP2.

    FSDP2 warns about modules that return views. Nothing here writes to them.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.pytorch")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def attention_kernels(plan: Plan, device: torch.device) -> dict[str, str]:
    """Return the kernel that `trainer.attention_kernel` selects here for each kind of block with softmax attention.

    Raises:
        ConfigError: the requested kernel does not support `device` or these heads.
    """
    config, degrees, found = plan.config, plan.degrees, dict[str, str]()
    model, name = config.model, config.trainer.attention_kernel
    for layer, mixer in mixers_of(config).items():
        if not isinstance(mixer, AttentionSpec):
            continue
        if not mixer.takes_kernels:
            found[layer] = "built-in operations"
            continue
        heads = mixer.heads(model)
        shape = AttentionShape(
            heads.queries // degrees.width, heads.keys // degrees.width, heads.width,
            config.data.sequence_length, is_masked(mixer, config, degrees.sequence, device.type == "cuda"),
            DTYPES[config.precision.compute_dtype], shared=degrees.sequence > 1, compiled=plan.compiled,
        )  # fmt: skip
        try:
            found[layer] = kernel_of(name, shape, device)
        except NoKernelError as error:
            text = f"not available for blocks of {layer} on {device}: {error} Use auto or another kernel."
            raise ConfigError(Problem(KEY, text, name)) from error
    return found


def kernel_line(kernels: dict[str, str], name: str) -> str | None:
    """Return the line about `kernels` for the start of a run; None if no block has softmax attention."""
    if not kernels:
        return None
    taken = set(kernels.values())
    each = taken.pop() if len(taken) == 1 else ", ".join(f"{layer}: {kernel}" for layer, kernel in kernels.items())
    return f"kernel attention: {each} ({KEY}={name})"
