"""Verification of checkpoints: every file against its digest, and the run, config and step metrics that belong to it.

Imports no torch.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import content_problem
from lightning_llm.config.config_hash import flatten, frozen_values, may_move
from lightning_llm.config.from_file import load_config
from lightning_llm.config.schema import Config
from lightning_llm.config.workspace import resume_elsewhere_command
from lightning_llm.tracking.files import damaged_record, summary_of
from lightning_llm.train.checkpoint.manifest import (
    ASIDE,
    UNSEALED,
    Checkpoint,
    Damage,
    DamagedError,
    RunIdentity,
    open_checkpoint,
    step_folders,
)

Verify = Callable[[Checkpoint], list[Damage]]


def content_damage(checkpoint: Checkpoint, rank: int = 0, world: int = 1) -> list[Damage]:
    """Return the files that do not match their digests; `rank` of `world` checks only its share of the files."""
    if checkpoint.version == UNSEALED:
        from lightning_llm.train.checkpoint.tensor_storage import structural_damage  # imports torch: only when needed

        return structural_damage(checkpoint) if rank == 0 else []
    largest_first = sorted(checkpoint.files.items(), key=lambda item: (-item[1].size_bytes, item[0]))
    return [
        Damage(checkpoint.folder, name, what)
        for name, written in largest_first[rank::world]
        if (what := content_problem(checkpoint.folder / name, written))
    ]


def verified(folder: Path, verify: Verify = content_damage) -> Checkpoint:
    """Return the checkpoint in `folder` if all its files are intact.

    Raises:
        ConfigError: it is damaged (lists every damaged file) or has another version.
    """
    try:
        checkpoint = open_checkpoint(folder)
        if damage := verify(checkpoint):
            raise DamagedError(*damage)
    except DamagedError as error:
        raise ConfigError([Problem(str(each.folder / each.file), f"{each.what}.") for each in error.damage]) from error
    return checkpoint


def newest_verified(
    folder: Path, verify: Verify = content_damage, afresh: bool = False
) -> tuple[Checkpoint | None, tuple[Damage, ...]]:
    """Return (newest intact checkpoint in `folder` or None, problems of skipped newer ones). Changes nothing.

    `afresh`: return None instead of raising if all checkpoints are outdated, or only moved-aside ones exist.

    Raises:
        ConfigError: there are checkpoints but none is intact (lists their problems), or one has another version.
    """
    passed: list[Damage] = []
    for path in step_folders(folder):
        try:
            checkpoint = open_checkpoint(path)
        except DamagedError as error:
            passed += error.damage
            continue
        damage = verify(checkpoint)
        if not damage:
            return checkpoint, tuple(passed)
        passed += damage
    aside = [path for name in ASIDE for path in (folder / name).glob("step=*")]
    if (not passed and not aside) or (afresh and all(each.outdated for each in passed)):
        return None, tuple(passed)
    problems = [Problem(f"{each.folder.name}/{each.file}", f"{each.what}.") for each in passed]
    hint = f" {', '.join(map(str, aside))} may be intact: try resume=PATH." if aside else ""
    text = f"no checkpoint in {folder} is intact, and nothing was changed. Restore one from a copy.{hint}"
    raise ConfigError([*problems, Problem("resume", text)])


def skipped_lines(damage: Sequence[Damage]) -> Iterator[str]:
    """Yield a line for each skipped checkpoint, with its first damaged file."""
    for folder, each in groupby(damage, key=lambda each: each.folder):
        first, *others = each
        more = f" (and {len(others)} more of its files)" if others else ""
        if first.outdated:
            yield f"skipped {folder.name}, which {first.what}"
            continue
        why = "from another run" if first.foreign else "damaged"
        yield f"skipped {folder.name}, which is {why}: {first.file} {first.what}{more}"


METRICS = "metrics.jsonl"
POLICY = "spikes.policy"


def of_its_run(verify: Verify) -> Verify:
    """Return a function like `verify` that first rejects checkpoints of another run.

    The run is identified by the folder's summary.json; without an id there, nothing is rejected.
    """

    def of_its_run(checkpoint: Checkpoint) -> list[Damage]:
        run = RunIdentity.from_summary(known_summary(checkpoint.run_folder))
        foreign = run and run.foreign(checkpoint)
        return [foreign] if foreign else verify(checkpoint)

    return of_its_run


def with_records(config: Config, verify: Verify) -> Verify:
    """Return a function like `verify` that first checks the metrics of the steps before a checkpoint.

    A resumed run continues these records in metrics.jsonl, so a damaged one makes the checkpoint unusable. For folders
    of earlier releases, the first step of the metrics is unknown: at most the step of the last resume.
    """
    folder = Path(config.run.dir)
    summary = known_summary(folder)
    known = RunIdentity.from_summary(summary)
    begun = known.begun_at_step if known else None
    at_latest = (summary.get("resumed_from_step") or 0) if summary else sys.maxsize

    def with_records(checkpoint: Checkpoint) -> list[Damage]:
        after = at_latest if begun is None else begun
        problem = damaged_record(folder / METRICS, checkpoint.step, after, begun is None, checkpoint.records)
        if problem:
            command = resume_elsewhere_command(checkpoint.folder, folder, config.trainer.max_steps)
            problem += f" (to continue in a new folder without these metrics: {command})"
        return [*([Damage(checkpoint.folder, METRICS, problem)] if problem else []), *verify(checkpoint)]

    return with_records


def config_of_run(checkpoint: Checkpoint) -> Config:
    """Return the config that `checkpoint` was trained with, from its run's folder.

    Raises:
        ConfigError: config.yaml cannot be read, or was changed since, with each key.
    """
    file = checkpoint.run_folder / "config.yaml"
    config = load_config(file, [])
    problems = [
        Problem(key, edited_text(file, checkpoint, trained, now))
        for key, (trained, now) in changed_since(checkpoint, config).items()
    ]
    if problems:
        raise ConfigError(problems)
    return config


def edited_text(file: Path, checkpoint: Checkpoint, trained: Any, now: Any) -> str:
    """Return the text of the problem that a key of config.yaml was changed after `checkpoint` was saved."""
    return f"is {now!r} in {file}, but was {trained!r} when {checkpoint.folder.name} was saved. Set it back there."


def changed_since(checkpoint: Checkpoint, config: Config) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value that `checkpoint` was trained with, value in `config`)} of keys that are fixed on resume.

    {} for checkpoints of earlier releases, which do not record them.
    """
    if checkpoint.frozen_config is None:
        return {}
    was, now = checkpoint.frozen_config, frozen_values(flatten(config.model_dump()))
    decided = checkpoint.events > 0  # spikes.policy has no effect before the first event
    keys = [key for key in sorted(was.keys() | now.keys()) if not may_move(key) and (decided or key != POLICY)]
    return {key: (was.get(key), now.get(key)) for key in keys if was.get(key) != now.get(key)}


def known_summary(folder: Path) -> dict[str, Any]:
    """Return the content of the folder's summary.json; {} if it is missing or damaged.

    Damage is reported by the code that needs the summary.
    """
    try:
        return summary_of(folder)
    except ValueError:
        return {}
