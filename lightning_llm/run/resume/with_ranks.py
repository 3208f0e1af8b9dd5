"""Going back: a run whose step was out of the ordinary goes on from a checkpoint before it, in the same processes."""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from lightning_llm.base.errors import AgreedError, ConfigError, Problem
from lightning_llm.data.mixing.skipped import Range
from lightning_llm.plan.resolve import Plan
from lightning_llm.run.agreement import decide_with_ranks
from lightning_llm.run.launch.environment import is_first_rank
from lightning_llm.run.launch.local_ranks import goes_on
from lightning_llm.run.resume.rollback import Rollback, skipped_samples, write_rollbacks
from lightning_llm.run.resume.start import Start
from lightning_llm.train.spikes.policy import SpikeRollback


def go_back(plan: Plan, start: Start, spike: SpikeRollback) -> tuple[Plan, Start, Rollback]:
    """Write down the rollback that `spike` asks a run that began from `start` for; return how it goes on. Collective.

    What is written decides alone from where it does: so a run that dies on the way goes on in the same way.

    Raises:
        ConfigError: on every rank, where it cannot be written, or no checkpoint verifies.
    """
    config = goes_on(plan.config)
    made = Rollback.of(spike.record, config, skipped_samples(config, start.rollbacks))
    problem = None
    if is_first_rank():
        try:
            write_rollbacks(Path(config.run.dir), [*start.rollbacks, made])
        except OSError as error:
            problem = Problem("run.dir", f"{config.run.dir} cannot be written ({error.strerror}). Make room there.")
    if dist.is_initialized():
        found = [problem]
        dist.broadcast_object_list(found, src=0)
        (problem,) = found
    if problem is not None:
        raise AgreedError(problem) if dist.is_initialized() else ConfigError(problem)
    return replace(plan, config=config), decide_with_ranks(config), made


def rollback_line(plan: Plan, start: Start, spike: SpikeRollback, skipped: Range) -> str:
    """Return what to say of a run that goes back to `start`."""
    spikes = plan.config.spikes
    first, last = skipped
    return (
        f"back   {spike}: to step {start.step}, without the samples {first} to {last} "
        f"(rollback {len(start.rollbacks)} of at most {spikes.max_rollbacks}, spikes.max_rollbacks)"
    )
