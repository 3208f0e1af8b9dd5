"""Decision of all ranks where a run starts, and rollbacks to an earlier checkpoint in the same processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_llm.base.errors import AgreedError, ConfigError, Problem
from lightning_llm.config.schema import Config
from lightning_llm.data.mixing.addressing import Range
from lightning_llm.parallel.process_group import gather_objects, object_of_first
from lightning_llm.plan.resolve import Plan
from lightning_llm.run.launch.environment import is_first_rank
from lightning_llm.run.launch.local_ranks import with_auto_resume
from lightning_llm.run.launch.lock import RunLock, lock_run
from lightning_llm.run.resume.rollback import Rollback, skipped_samples, write_rollbacks
from lightning_llm.run.resume.start import Start, decide_start
from lightning_llm.train.checkpoint.manifest import Checkpoint, Damage
from lightning_llm.train.checkpoint.verification import Verify, content_damage
from lightning_llm.train.spikes.policy import SpikeRollback


def decide_with_ranks(config: Config, locks: list[RunLock] | None = None) -> Start:
    """Return how the run starts, decided by rank 0. Each rank verifies its share of a checkpoint's files.

    `locks`: rank 0 first locks the run's folder and appends the lock; None: it is already locked.

    Raises:
        ConfigError: on every rank, with the problems found by rank 0.
    """
    if not dist.is_initialized():
        return _decide_locked(config, content_damage, locks)
    decision: Start | ConfigError
    if is_first_rank():
        try:
            decision = _decide_locked(config, _verify_on_all_ranks, locks)
        except ConfigError as error:
            decision = error
        object_of_first(decision)
    else:
        nothing: Any = None  # replaced by rank 0's value
        while isinstance(asked := object_of_first(nothing), Checkpoint):
            _verify_share(asked)
        decision = asked
    if isinstance(decision, ConfigError):
        raise AgreedError(decision.problems)
    return decision


def _decide_locked(config: Config, verify: Verify, locks: list[RunLock] | None) -> Start:
    if locks is not None:
        locks.append(lock_run(Path(config.run.dir)))
    return decide_start(config, verify)


def _verify_on_all_ranks(checkpoint: Checkpoint) -> list[Damage]:
    """Return the damage found by all ranks. Called by rank 0 while the others wait in `decide_with_ranks`.

    Raises:
        ConfigError: the checkpoint's folder is not visible on a rank.
    """
    object_of_first(checkpoint)
    found = _verify_share(checkpoint)
    if blind := [str(rank) for rank, damage in enumerate(found) if damage is None]:
        text = f"{checkpoint.folder} is not visible on rank(s) {', '.join(blind)}. Use storage shared by all nodes."
        raise ConfigError(Problem("resume", text))
    return [each for damage in found for each in damage or ()]


def _verify_share(checkpoint: Checkpoint) -> list[list[Damage] | None]:
    """Return the damage in each rank's share of the files, None from ranks that do not see them. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return gather_objects(content_damage(checkpoint, rank, world) if checkpoint.folder.is_dir() else None)


def go_back(plan: Plan, start: Start, spike: SpikeRollback) -> tuple[Plan, Start, Rollback]:
    """Save the rollback after `spike` in a run that began from `start`; return how the run continues. Collective.

    The file alone determines where the run continues, so a run that is killed now resumes in the same way.

    Raises:
        ConfigError: on every rank, if it cannot be written, or no checkpoint is intact.
    """
    config = with_auto_resume(plan.config)
    made = Rollback.of(spike.record, config, skipped_samples(config, start.rollbacks))
    problem = None
    if is_first_rank():
        try:
            write_rollbacks(Path(config.run.dir), [*start.rollbacks, made])
        except OSError as error:
            problem = Problem("run.dir", f"{config.run.dir} cannot be written ({error.strerror}). Fix this and resume.")
    problem = object_of_first(problem)
    if problem is not None:
        raise AgreedError(problem) if dist.is_initialized() else ConfigError(problem)
    return replace(plan, config=config), decide_with_ranks(config), made


def rollback_line(plan: Plan, start: Start, spike: SpikeRollback, skipped: Range) -> str:
    """Return the line about a rollback to `start`."""
    spikes = plan.config.spikes
    first, last = skipped
    return (
        f"back   {spike}: rolled back to step {start.step}, skipping the samples {first} to {last} "
        f"(rollback {len(start.rollbacks)} of at most {spikes.max_rollbacks}, spikes.max_rollbacks)"
    )
