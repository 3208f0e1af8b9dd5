"""Rollbacks of a run (`spikes.policy=rollback`): kept beside its records, since these are cut back. Imports no torch.

A run's order of samples is that of its config without those that the config or a rollback leaves out. A checkpoint is
one that it can go on from if it was trained on the same samples, in the same order, as the run would take up to there.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema import Config
from lightning_llm.data.mixing.skipped import SKIPPED_SAMPLES, Range, before, index_of, merged
from lightning_llm.tracking.files import write_json
from lightning_llm.train.checkpoint.manifest import PROGRESS, Checkpoint, Damage
from lightning_llm.train.checkpoint.verification import Verify

ROLLBACKS = "rollbacks.json"


class Rollback(NamedTuple):
    """One: the `record` of the step that was out of the ordinary, and the samples left out because of it."""

    record: dict[str, Any]
    skipped: Range

    @classmethod
    def of(cls, record: dict[str, Any], config: Config, skipped: Sequence[Range]) -> Self:
        """Return the rollback of a run that leaves out `skipped` already, for the step of `record`.

        Left out are the samples of that step and of those before it, `spikes.rollback_skip_steps` steps in all.
        """
        width, step = config.data.global_batch_size, int(record["step"])
        first = max(0, step - config.spikes.rollback_skip_steps) * width
        return cls(record, (index_of(first, skipped), index_of(step * width - 1, skipped)))


def read_rollbacks(folder: Path) -> tuple[Rollback, ...]:
    """Return the rollbacks of the run in `folder`, in their order.

    Raises:
        ConfigError: the file does not hold what was written.
    """
    file = folder / ROLLBACKS
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))["rollbacks"]
        return tuple(Rollback(dict(each["record"]), _range(each["skipped"])) for each in listed)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{file} cannot be read ({error}), and says which samples the run leaves out. Bring it back from a copy."
        raise ConfigError(Problem("run.dir", text)) from error


def write_rollbacks(folder: Path, rollbacks: Iterable[Rollback]) -> None:
    """Write all of a run's rollbacks, at once or not at all."""
    write_json(folder / ROLLBACKS, {"rollbacks": [each._asdict() for each in rollbacks]})


def skipped_samples(config: Config, rollbacks: Iterable[Rollback]) -> tuple[Range, ...]:
    """Return all samples that a run of `config` leaves out after `rollbacks`."""
    return merged([*(config.data.skip_samples or ()), *(each.skipped for each in rollbacks)])


def rollback_facts(rollbacks: Sequence[Rollback], skipped: Sequence[Range]) -> dict[str, Any]:
    """Return what summary.json says of them, and of all samples that are left out; nothing where there is nothing."""
    listed = [
        {"step": each.record["step"], "event": each.record.get("event"), "skipped": each.skipped} for each in rollbacks
    ]
    found: dict[str, Any] = {"rollbacks": listed} if listed else {}
    return found | ({SKIPPED_SAMPLES: [list(each) for each in skipped]} if skipped else {})


def with_same_samples(config: Config, verify: Verify) -> Verify:
    """Return `verify` with a look at the samples that a checkpoint was trained on, and those that its run leaves out.

    Raises, when it is called:
        ConfigError: nothing says what these are.
    """

    def same_samples(checkpoint: Checkpoint) -> list[Damage]:
        now = skipped_samples(config, read_rollbacks(checkpoint.run_folder))
        problem = other_samples(checkpoint, now, config.data.global_batch_size)
        return [Damage(checkpoint.folder, PROGRESS, problem, outdated=True)] if problem else verify(checkpoint)

    return same_samples


def other_samples(checkpoint: Checkpoint, now: Sequence[Range], global_batch_size: int) -> str | None:
    """Return what the checkpoint was trained on and the run leaves out `now`, or the other way round; None if nothing.

    The rest of a sentence.
    """
    then = merged(checkpoint.progress.get(SKIPPED_SAMPLES, ()))
    if checkpoint.step == 0:
        return None
    end = index_of(checkpoint.step * global_batch_size - 1, then) + 1
    was, would = before(end, then), before(end, now)
    if was == would:
        return None
    if any(each not in was for each in would):
        extra = [each for each in now if each[0] < end and each not in then]
        return f"was trained on some of the samples {_words(extra)}, which are left out now"
    return f"was trained without the samples {_words([each for each in was if each not in would])}"


def _words(ranges: Iterable[Range]) -> str:
    return ", ".join(f"{first} to {last}" for first, last in ranges)


def _range(pair: Sequence[Any]) -> Range:
    first, last = pair
    return int(first), int(last)
