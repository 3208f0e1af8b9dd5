"""What one rank trains with, settled with the others before a folder is touched."""

import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import torch

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema import Config
from lightning_llm.model.structure import has_bias
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.process_group import record_collectives
from lightning_llm.plan.nodes import ranks_per_node
from lightning_llm.plan.resolve import Plan
from lightning_llm.precision.cast.inductor import no_compiler
from lightning_llm.precision.linear.swap import choose_backend
from lightning_llm.precision.native.codes import check_native_casts
from lightning_llm.precision.native.decide import Decision
from lightning_llm.run.agreement import agree_on_plan
from lightning_llm.run.opening import attention_kernels
from lightning_llm.run.build import build_callbacks, choose_device
from lightning_llm.run.opening import keep_memory
from lightning_llm.run.launch.environment import say


@dataclass(frozen=True)
class Rank:
    """What one rank trains with, past all that can be refused before a folder is touched."""

    plan: Plan
    device: torch.device
    layout: Layout
    callbacks: Mapping[str, pl.Callback]
    attention: dict[str, str]


def prepare_rank(plan: Plan) -> Rank:
    """Look at what this machine makes of `plan`, and settle it with the other ranks. Collective.

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


def quiet_lightning() -> None:
    """Keep Lightning's hints about settings that are chosen here on purpose out of the user's terminal; FSDP2's, too.

    It warns of views that modules return, which nothing here writes to.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"lightning\.pytorch")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
