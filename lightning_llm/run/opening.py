"""Open one rank of a run: device, callbacks, layout, kernels, health, one plan on all ranks."""

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
from lightning_llm.model.attention.kernel_choice import AttentionShape, NoKernelError, kernel_of
from lightning_llm.model.attention.kinds import AttentionSpec
from lightning_llm.model.dtypes import DTYPES
from lightning_llm.model.structure import has_bias
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.process_group import gather_objects, object_of_first, record_collectives
from lightning_llm.plan.attention_kernel import KEY, is_masked, mixers_of
from lightning_llm.plan.nodes import ranks_per_node
from lightning_llm.plan.resolve import Plan
from lightning_llm.precision.cast.inductor import no_compiler
from lightning_llm.precision.linear.swap import choose_backend
from lightning_llm.precision.native.codes import check_native_casts
from lightning_llm.precision.native.decide import Decision
from lightning_llm.run.launch.environment import rank_environment, say


@dataclass(frozen=True)
class Rank:
    """One rank of a run, after all checks that precede any change to its folder. `attention`: kernel by block."""

    plan: Plan
    device: torch.device
    layout: Layout
    callbacks: Mapping[str, pl.Callback]
    attention: dict[str, str]


def open_rank(plan: Plan) -> Rank:
    """Open this rank of `plan`: its device, callbacks and kernels, joined with the other ranks. Collective.

    Raises:
        ConfigError: on every rank, what any of them refuses; at once where this one has no device to join them with.
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
    record_collectives(device, Path(plan.config.run.dir))
    return Rank(plan, device, layout, callbacks, attention)


def choose_device(config: Config) -> torch.device:
    """Return the device of this rank: the CUDA device of its local number, or the CPU.

    Raises:
        ConfigError: trainer.accelerator=cuda where torch finds no CUDA device, or fewer than ranks.
    """
    wanted, found = config.trainer.accelerator, torch.cuda.is_available()
    if wanted == "cuda" and not found:
        text = f"is 'cuda', and torch {torch.__version__} finds no CUDA device. Set auto or cpu."
        raise ConfigError(Problem("trainer.accelerator", text))
    if not found or wanted == "cpu":
        return torch.device("cpu")
    environment = rank_environment()
    if config.trainer.devices > torch.cuda.device_count():
        text = (
            f"is {config.trainer.devices}, and this machine has {torch.cuda.device_count()} CUDA device(s). Lower it."
        )
        raise ConfigError(Problem("trainer.devices", text))
    device = torch.device("cuda", environment.local_rank if environment else 0)
    torch.cuda.set_device(device)
    return device


def build_callbacks(config: Config) -> dict[str, pl.Callback]:
    """Return the callbacks of the config by name. Source text was checked before; this is the class itself.

    Raises:
        ConfigError: with each that cannot be imported or made, is none, or would fight the strategy, and where two have
            state under one key.
    """
    made: dict[str, pl.Callback] = {}
    problems = []
    for name, node in config.callbacks.items():
        if node is None:
            continue
        key = f"callbacks.{name}"
        try:
            callback = instantiate(node, _convert_="all")
        except (Exception, SystemExit) as error:  # an import, or whatever a constructor has against its arguments
            cause = error.__cause__ or error
            if isinstance(cause, ConfigError):  # one of ours says which argument, and what to change
                problems += [Problem(f"{key}.{each.key}", each.text) for each in cause.problems]
                continue
            text = f"{node['_target_']} cannot be made: {type(cause).__name__}: {one_line(str(cause))}"
            problems.append(Problem(key, text))
            continue
        lineage = [f"{each.__module__}.{each.__qualname__}" for each in type(callback).__mro__]
        if problem := refused(node["_target_"], lineage):
            problems.append(Problem(f"{key}._target_", problem))
        made[name] = callback
    stateful = [each.state_key for each in made.values() if type(each).state_dict is not pl.Callback.state_dict]
    for key in sorted({each for each in stateful if stateful.count(each) > 1}):
        text = f"hold two with state under '{key}'. Give their class a state_key that tells them apart."
        problems.append(Problem("callbacks", text))
    if sum(isinstance(each, WeightAveraging) for each in made.values()) > 1:
        problems.append(Problem("callbacks", "hold two that average weights, which validation can see but one of."))
    if problems:
        raise ConfigError(problems)
    return made


def check_casts(config: Config, decision: Decision, device: torch.device) -> None:
    """Raise ConfigError where the recipe's casts cannot run on `device`, or natively are not the recipe's."""
    if decision.runs == "refused":  # a rank may find another machine than the one that was checked
        raise ConfigError(decision.refusals())
    if decision.runs == "emulated":
        choose_backend(config.precision, device.type)
    elif decision.natives:
        unchecked = check_native_casts(config.precision, device, has_bias(config.model))
        if unchecked is not None:
            say(unchecked)


def check_compiler(config: Config, device: torch.device) -> None:
    """Raise ConfigError where blocks are to be compiled and `device` has no compiler."""
    reason = no_compiler(device.type) if config.parallel.compile else None
    if reason is not None:
        text = f"is true, and {reason}. Mend that, or set trainer.compile=false, which it follows."
        raise ConfigError(Problem("parallel.compile", text))


def open_layout(plan: Plan, device: torch.device) -> Layout:
    """Return this rank's layout, with the process group joined that it needs; one rank that shards nothing has none."""
    return Layout.joined(plan.parallel, plan.degrees, device, ranks_per_node(plan.config))


class RankReport(NamedTuple):
    """What one rank says of itself. `runs`: how casts would run there; `compiled`: whether blocks would be;
    `problems`: what it refuses."""

    devices: int
    config_hash: str
    runs: str
    compiled: bool
    problems: tuple[Problem, ...]


def agree_on_plan(plan: Plan, refusal: ConfigError | None = None) -> Plan:
    """Return the plan with rank 0's config: of those composed apart, names made of the time may differ. Collective.

    `refusal` is why this rank cannot train.

    Raises:
        ConfigError: on every rank, with what any refuses; or where one was started with something else, or would run
            casts otherwise than rank 0.
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
        text = f"ranks per machine are {', '.join(map(str, devices))}. Start as many on each."
        raise AgreedError(Problem("trainer.devices", text))
    if others := [rank for rank, each in enumerate(found) if each.config_hash != found[0].config_hash]:
        text = f"of rank(s) {listed(others)} differs from rank 0's. Start all with the same words."
        raise AgreedError(Problem("the config", text))
    if others := [rank for rank, each in enumerate(found) if each.runs != found[0].runs]:
        text = (
            f"casts would be {found[0].runs} on rank 0 and {found[others[0]].runs} on rank(s) {listed(others)}. Set "
            "emulated, or start all ranks on machines that are alike."
        )
        raise AgreedError(Problem("precision.backend", text))
    if others := [rank for rank, each in enumerate(found) if each.compiled != found[0].compiled]:
        compiled, not_compiled = ("rank 0", f"rank(s) {listed(others)}")[:: 1 if found[0].compiled else -1]
        text = f"blocks would be compiled on {compiled} and not on {not_compiled}. Set true or false."
        raise AgreedError(Problem("parallel.compile", text))
    return replace(plan, config=object_of_first(plan.config))


def problems_of_ranks(problems: list[tuple[Problem, ...]]) -> list[Problem]:
    """Return each rank's problems once, with the ranks that have it where not all do."""
    found: dict[Problem, list[int]] = {}
    for rank, its in enumerate(problems):
        for each in dict.fromkeys(its):
            found.setdefault(each, []).append(rank)
    return [
        each if len(ranks) == len(problems) else Problem(each.key, f"on rank(s) {listed(ranks)} {each.text}")
        for each, ranks in found.items()
    ]


def listed(ranks: list[int]) -> str:
    """Return "1, 4, 5" for a message."""
    return ", ".join(map(str, ranks))


def joined_ranks(config: Config) -> Ranks:
    """Return the ranks that have joined, as a check of them meets them. Collective."""
    here = rank_environment()
    local_rank, local_world = (here.local_rank, here.local_world) if here else (0, 1)
    return Ranks(local_rank, local_world, config.parallel.timeout_seconds)


def refuse_unhealthy(ranks: Ranks, device: torch.device) -> str:
    """Check all ranks in short; return what to say where nothing is wrong. Collective.

    Raises:
        UnhealthyError: on every rank, with what is wrong, on which rank of which machine.
    """
    start = time.perf_counter()
    report = check_health(ranks, device, SHORT[device.type])
    if device.type == "cuda":  # what the check held is not the run's
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if faults := [*report.wrong, *report.slow_lines()]:
        raise UnhealthyError(f"trainer.health: {'; '.join(faults)}", speaks=ranks.rank == 0)
    seconds = time.perf_counter() - start
    return f"health {ranks.world} rank{'s' if ranks.world > 1 else ''}: values right, none slow ({seconds:.1f} s)"


def quiet_lightning() -> None:
    """Keep Lightning's hints about settings that are chosen here on purpose out of the user's terminal; FSDP2's, too.

    It warns of views that modules return, which nothing here writes to.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.pytorch")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


def attention_kernels(plan: Plan, device: torch.device) -> dict[str, str]:
    """Return the kernel of each kind of block with softmax attention, as `trainer.attention_kernel` has it here.

    Raises:
        ConfigError: the kernel that is asked for does not run on `device` with these heads, for torch's reasons.
    """
    config, degrees, found = plan.config, plan.degrees, dict[str, str]()
    model, name = config.model, config.trainer.attention_kernel
    for layer, mixer in mixers_of(config).items():
        if not isinstance(mixer, AttentionSpec):
            continue
        if not mixer.takes_kernels:
            found[layer] = "operations of its own"
            continue
        shape = AttentionShape(
            model.num_heads // degrees.width, model.num_kv_heads // degrees.width, model.attention_head_dim,
            config.data.sequence_length, is_masked(mixer, config, degrees.sequence, device.type == "cuda"),
            DTYPES[config.precision.compute_dtype], shared=degrees.sequence > 1, compiled=plan.compiled,
        )  # fmt: skip
        try:
            found[layer] = kernel_of(name, shape, device)
        except NoKernelError as error:
            text = f"is {name}, and blocks of {layer} cannot have it on {device}: {error} Set auto, or another kernel."
            raise ConfigError(Problem(KEY, text)) from error
    return found


def kernel_line(kernels: dict[str, str], name: str) -> str | None:
    """Return the opening line on `kernels`; None where no block has softmax attention."""
    if not kernels:
        return None
    taken = set(kernels.values())
    each = taken.pop() if len(taken) == 1 else ", ".join(f"{layer}: {kernel}" for layer, kernel in kernels.items())
    return f"kernel attention by {each} ({KEY}={name})"
