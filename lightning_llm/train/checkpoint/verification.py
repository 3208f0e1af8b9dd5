"""Verification of checkpoints: compare every file with its digest, and find the newest checkpoint that is intact.

Imports no torch.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import content_problem
from lightning_llm.train.checkpoint.manifest import (
    ASIDE,
    UNSEALED,
    Checkpoint,
    Damage,
    DamagedError,
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
