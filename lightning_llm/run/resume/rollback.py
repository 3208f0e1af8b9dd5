"""Rollbacks of a run (`spikes.policy=rollback`). Imports no torch.

They are stored in a separate file, since a rollback truncates the metrics. A run takes its samples in the config's
order, without those skipped by the config or a rollback. It can resume from a checkpoint that was trained on the same
samples in the same order.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema import Config
from lightning_llm.data.mixing.addressing import SKIPPED_SAMPLES, Range, before, index_of, merged
from lightning_llm.tracking.files import write_json
from lightning_llm.train.checkpoint.manifest import PROGRESS, Checkpoint, Damage
from lightning_llm.train.checkpoint.verification import Verify

ROLLBACKS = "rollbacks.json"


class Rollback(NamedTuple):
    """One rollback of a run to an earlier checkpoint because of a spike."""

    record: dict[str, Any]
    """Metrics of the step with the spike."""
    skipped: Range
    """First and last index of the samples that the run skips from then on."""

    @classmethod
    def from_record(cls, record: dict[str, Any], config: Config, skipped: Sequence[Range]) -> Self:
        """Return the rollback because of the step with metrics `record`, in a run that already skips `skipped`.

        It skips the samples of that step and of the steps before it, `spikes.rollback_skip_steps` steps in total.
        """
        width, step = config.data.global_batch_size, int(record["step"])
        first = max(0, step - config.spikes.rollback_skip_steps) * width
        return cls(record, (index_of(first, skipped), index_of(step * width - 1, skipped)))


def read_rollbacks(folder: Path) -> tuple[Rollback, ...]:
    """Return the rollbacks of the run in `folder` (rollbacks.json), in order; () if there were none.

    Raises:
        ConfigError: the file is damaged.
    """
    file = folder / ROLLBACKS
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))["rollbacks"]
        return tuple(Rollback(dict(each["record"]), _range(each["skipped"])) for each in listed)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{file} cannot be read ({error}), but lists the samples that the run skips. Restore it from a copy."
        raise ConfigError(Problem("run.dir", text)) from error


def write_rollbacks(folder: Path, rollbacks: Iterable[Rollback]) -> None:
    """Replace rollbacks.json in `folder` by all `rollbacks` of the run, atomically."""
    write_json(folder / ROLLBACKS, {"rollbacks": [each._asdict() for each in rollbacks]})


def skipped_samples(config: Config, rollbacks: Iterable[Rollback]) -> tuple[Range, ...]:
    """Return the ranges of samples that a run skips: `data.skip_samples` of `config` and those of its `rollbacks`."""
    return merged([*(config.data.skip_samples or ()), *(each.skipped for each in rollbacks)])


def rollback_facts(rollbacks: Sequence[Rollback], skipped: Sequence[Range]) -> dict[str, Any]:
    """Return the facts for summary.json: rollbacks and all skipped samples, each only if there are any."""
    listed = [
        {"step": each.record["step"], "event": each.record.get("event"), "skipped": each.skipped} for each in rollbacks
    ]
    found: dict[str, Any] = {"rollbacks": listed} if listed else {}
    return found | ({SKIPPED_SAMPLES: [list(each) for each in skipped]} if skipped else {})


def with_same_samples(config: Config, verify: Verify) -> Verify:
    """Return a function like `verify` that first rejects checkpoints trained on samples that their run skips now.

    Raises, when it is called:
        ConfigError: the file of rollbacks is damaged.
    """

    def same_samples(checkpoint: Checkpoint) -> list[Damage]:
        now = skipped_samples(config, read_rollbacks(checkpoint.run_folder))
        problem = other_samples(checkpoint, now, config.data.global_batch_size)
        return [Damage(checkpoint.folder, PROGRESS, problem, outdated=True)] if problem else verify(checkpoint)

    return same_samples


def other_samples(checkpoint: Checkpoint, now: Sequence[Range], global_batch_size: int) -> str | None:
    """Return how the samples of the checkpoint differ from those of a run that skips `now`; None if they are the same.

    The text continues a sentence with the checkpoint as its subject.
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
        return f"was trained on some of the samples {_words(extra)}, which are skipped now"
    return f"was trained without the samples {_words([each for each in was if each not in would])}"


def _words(ranges: Iterable[Range]) -> str:
    return ", ".join(f"{first} to {last}" for first, last in ranges)


def _range(pair: Sequence[Any]) -> Range:
    first, last = pair
    return int(first), int(last)
