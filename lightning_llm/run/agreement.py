"""Agreement of all ranks: facts for summary.json, differences between machines and sessions, the run's folder."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_llm.base.errors import AgreedError, Problem
from lightning_llm.config.config_hash import below
from lightning_llm.config.schema import Config
from lightning_llm.config.weight_folders import TOKENIZER
from lightning_llm.config.workspace import same_folder
from lightning_llm.config.yaml_file import write_config
from lightning_llm.data.corpus import Corpus
from lightning_llm.parallel.process_group import gather_objects
from lightning_llm.run.facts import fingerprint, origin_here, resume_history, run_facts
from lightning_llm.run.inputs import Inputs
from lightning_llm.run.launch.environment import is_first_rank, print_once
from lightning_llm.run.launch.lock import lock_made_folder
from lightning_llm.run.opening import Rank
from lightning_llm.run.resume.branch import branch_facts
from lightning_llm.run.resume.rollback import Rollback, rollback_facts, skipped_samples, write_rollbacks
from lightning_llm.run.resume.start import Start
from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.provenance import (
    FINGERPRINT,
    has_fingerprint,
    origin_changes,
    origin_of,
)
from lightning_llm.tracking.rank_liveness import clear_beats

CHANGES_NUMBERS = ("versions.", f"{FINGERPRINT}.", "device", "threads", "compiled", "backend", "code_hash")
SHOWN = 8
"""Maximum number of differences listed in a line."""


def agree(rank: Rank, start: Start, inputs: Inputs) -> tuple[dict[str, Any], Callable[[], None] | None]:
    """Return the facts for summary.json and the writer returned by `prepare_folder`. Collective.

    Raises:
        ConfigError: on every rank, if machines differ and resume_strict is set, or the folder cannot be written.
    """
    config = rank.plan.config
    facts = run_facts(config, inputs.corpus, rank.plan.decision) | start.run.facts() | inputs.facts
    facts |= branch_facts(config, start) | {FINGERPRINT: fingerprint(rank.device)}
    facts |= rollback_facts(start.rollbacks, skipped_samples(config, start.rollbacks))
    here = origin_here(rank.plan, rank.device) | facts
    for line in agree_on_fingerprint(config, start, here):
        print_once(line)
    if is_first_rank() and (earlier := resume_history(config, start, here)):
        facts["earlier"] = earlier
    return facts, prepare_folder(config, inputs.corpus, start)


def agree_on_fingerprint(config: Config, start: Start, here: Mapping[str, Any]) -> list[str]:
    """Return lines about differences from the steps before `start` and between ranks. Collective.

    `here` are the facts of this rank for the summary: versions, code, device and fingerprint.

    Raises:
        AgreedError: on every rank, if a resumed run has `resume_strict` set and something differs.
    """
    own = _numbers(here)
    ranks = gather_objects(own)
    changed = _since(start, ranks[0])
    others = {rank: origin_changes(ranks[0], each) for rank, each in enumerate(ranks) if each != ranks[0]}
    strict = config.resume_strict and start.checkpoint is not None and start.parent is None
    if strict and (problems := [*_unknown(start), *_refusals(start, changed), *_rank_refusals(others)]):
        raise AgreedError(problems)
    lines = []
    if changed:
        lines.append(f"note   changed since the previous session: {_listed(changed)} (resume_strict=true forbids this)")
    for differing in {_listed(each): None for each in others.values()}:
        same = ", ".join(str(rank) for rank, each in others.items() if _listed(each) == differing)
        lines.append(f"note   ranks differ: {differing} on rank(s) {same}")
    return lines


def _numbers(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in origin_of(summary).items() if below(key, CHANGES_NUMBERS)}


def _since(start: Start, now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value in the previous session, value now)} of recorded keys; {} for a new run and a branch."""
    if start.checkpoint is None or start.step == 0 or start.parent is not None:
        return {}
    return origin_changes(_numbers(summary_of(start.checkpoint.run_folder)), now)


def _listed(differing: Mapping[str, tuple[Any, Any]]) -> str:
    words = [f"{key} {_word(before)} -> {_word(now)}" for key, (before, now) in differing.items()]
    return "; ".join([*words[:SHOWN], *([f"{len(words) - SHOWN} more"] if len(words) > SHOWN else [])])


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


def _unknown(start: Start) -> list[Problem]:
    folder = start.checkpoint.run_folder if start.checkpoint else Path()
    if has_fingerprint(origin_of(summary_of(folder))):
        return []
    text = f"cannot be checked: {folder} has no fingerprint (written by an earlier release). Set it to false."
    return [Problem("resume_strict", text, "true")]


def _refusals(start: Start, changed: Mapping[str, tuple[Any, Any]]) -> list[Problem]:
    where = start.checkpoint.run_folder if start.checkpoint else ""
    text = "is {}, but was {} in {}. Restore it, or set resume_strict=false to only report the change."
    return [Problem(key, text.format(_word(now), _word(before), where)) for key, (before, now) in changed.items()]


def _rank_refusals(others: Mapping[int, Mapping[str, tuple[Any, Any]]]) -> list[Problem]:
    text = "is {} on rank {}, but {} on rank 0. Use identical machines, or set resume_strict=false."
    return [
        Problem(key, text.format(_word(its), rank, _word(first)))
        for rank, differing in others.items()
        for key, (first, its) in differing.items()
    ]


def prepare_folder(config: Config, corpus: Corpus, start: Start) -> Callable[[], None] | None:
    """Create the run's folder with config.yaml and tokenizer.json. Collective.

    If the run resumes in its own folder, nothing is written yet: return a function that writes these files, to be
    called on rank 0 once `start` has loaded on every rank.

    Raises:
        ConfigError: on every rank, if rank 0 cannot write the folder, or a rank does not see it.
    """
    folder = Path(config.run.dir)
    goes_on = start.checkpoint is not None and same_folder(start.checkpoint.run_folder, folder)
    if start.checkpoint is not None and start.parent is None and not goes_on:
        # If killed before its first checkpoint, the run starts there again. For a branch, branch_from records it.
        config = config.model_copy(update={"resume": str(start.checkpoint.folder)})
    rollbacks = () if goes_on else start.rollbacks
    write = partial(_write_first, config, corpus, rollbacks)
    problem = None
    if is_first_rank() and not goes_on:
        problem = _made(folder, write) or lock_made_folder(folder)
    if is_first_rank():
        clear_beats(folder)
    if dist.is_initialized():
        dist.barrier()
        seen = gather_objects(((folder / "config.yaml").is_file(), problem))
        problem = seen[0][1]
        if problem is None and not all(sees for sees, _ in seen):
            blind = ", ".join(str(rank) for rank, (sees, _) in enumerate(seen) if not sees)
            text = f"{folder} is not visible on rank(s) {blind}. Set run.root to storage shared by all nodes."
            problem = Problem("run.dir", text)
    if problem:
        raise AgreedError(problem)
    return write if goes_on else None


def _made(folder: Path, write: Callable[[], None]) -> Problem | None:
    """Create `folder` and call `write`; on failure, remove all new files and return the problem."""
    before = set(folder.iterdir()) if folder.is_dir() else None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write()
    except OSError as error:
        with suppress(OSError):
            for left in set(folder.iterdir()) - (before or set()):
                left.unlink()
            if before is None:
                folder.rmdir()
        text = f"{folder} cannot be written ({error.strerror or error}). Fix this, or choose another run.root."
        return Problem("run.dir", text)
    return None


def _write_first(config: Config, corpus: Corpus, rollbacks: Sequence[Rollback]) -> None:
    folder = Path(config.run.dir)
    if rollbacks:
        write_rollbacks(folder, rollbacks)
    write_config(config, folder / "config.yaml")
    written = corpus.tokenizer.save(folder / f"{TOKENIZER}.partial")
    written.rename(folder / TOKENIZER)
    corpus.tokenizer.declare_end(folder)
