"""Select the runs that a comparison can use (finished, in one metric, no copies), and report unfinished ones."""

import json
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.runs.factor import Factor, Level, parsed, same_value
from lightning_llm.compare.runs.losses import LOSS
from lightning_llm.config.config_hash import NOT_IDENTITY, below, frozen_values, may_move
from lightning_llm.config.workspace import resume_command
from lightning_llm.tracking.reading import Run, facts
from lightning_llm.tracking.run_state import state_of
from lightning_llm.tracking.sweep_definition import command_for_the_rest
from lightning_llm.tracking.sweep_file import FILE, ended_by_search, read_sweep_file

NOT_STARTED = "not started"
UNREADABLE = "unreadable"
KILLED = "killed, its process is gone"
RUNNING, ENDED_EARLY = "running", "ended early"
AS_THEY_ARE = (RUNNING, ENDED_EARLY)
"""States of runs that need no action."""
MOST_NUMBERS = 8
"""Maximum number of listed jobs."""
REMEDY = "None of them is used: the original is unknown. Remove the copy, or name only the intact runs."


def split_usable(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Return (runs that finished or diverged, which can be judged; all other runs)."""
    usable = [run for run in runs if run.finished or run.diverged]
    return usable, [run for run in runs if not (run.finished or run.diverged)]


def why_incomparable(usable: Sequence[Run], metric: str) -> Problem | None:
    """Return the problem if finished runs cannot be compared by `metric`: too few, or not measured alike; else None."""
    if len(usable) < 2:
        text = (
            f"{len(usable)} finished run{'' if len(usable) == 1 else 's'}: a verdict needs a baseline and another run."
        )
        return Problem("RUN", text)
    measured = [run for run in usable if metric in run.validations]
    if not measured:
        known = ", ".join(sorted({key for run in usable for key in run.validations})) or "none at all"
        return Problem("--metric", f"no run has a validation of '{metric}'. Available: {known}.")
    measured_on = {run.evaluated_on.get(metric, "") for run in measured}
    if len(measured_on) > 1:
        text = f"'{metric}' was measured on different data: {'; '.join(sorted(measured_on))}. Evaluate "
        return Problem("--metric", f"{text}all runs with the same --limit and --data.")
    return None


def newest_of_same(runs: list[Run]) -> tuple[list[Run], list[str]]:
    """Return (runs without repeated runs of identical results, notes); the newest of such runs is kept.

    Reruns with other losses (kernels with timing-dependent sums) are both kept: an A/A pair.
    """
    newest: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: run.started_at):
        config = {key: value for key, value in run.config.items() if not below(key, NOT_IDENTITY)}
        same = (config, dict(facts(run)), not run.diverged and run.validations)
        newest[json.dumps(same, sort_keys=True, default=str)] = run
    kept = {id(run) for run in newest.values()}
    dropped = [run.name for run in runs if id(run) not in kept]
    notes = [f"Rerun later with the same losses, so left out: {', '.join(dropped)}."] if dropped else []
    return [run for run in runs if id(run) in kept], notes


def without_copies(runs: Sequence[Run]) -> tuple[list[Run], list[Problem]]:
    """Return (runs without copies, a problem for each copy).

    A copy shares its run id or all losses with a run from which it must differ.

    A run id belongs to one run, with one seed and one config (except keys that may change on resume). Runs of different
    seeds have other weights and data, and never the same losses throughout. An exact copy is no problem: of equal runs
    the newest is kept.
    """
    found: dict[int, Problem] = {}
    for one, other in _contradicting(runs, _run_id, _frozen):
        text = f"has the run id of {other.name} ({str(_run_id(one))[:8]}) but another seed or config. {REMEDY}"
        found.setdefault(id(one), Problem(str(one.folder), text))
    for one, other in _contradicting(runs, _curve, lambda run: str(run.seed)):
        text = f"has all losses of {other.name}, which has seed {other.seed} instead of {one.seed}. {REMEDY}"
        found.setdefault(id(one), Problem(str(one.folder), text))
    return [run for run in runs if id(run) not in found], list(found.values())


def _contradicting(
    runs: Iterable[Run], shared: Callable[[Run], Hashable], own: Callable[[Run], str]
) -> Iterable[tuple[Run, Run]]:
    """Yield each run with another run that has the same `shared` value (not None) and a different `own` value."""
    groups: dict[Hashable, list[Run]] = {}
    for run in runs:
        if (key := shared(run)) is not None:
            groups.setdefault(key, []).append(run)
    for group in groups.values():
        if len(group) < 2:
            continue
        values = [own(run) for run in group]
        for run, value in zip(group, values, strict=True):
            others = (other for other, its in zip(group, values, strict=True) if its != value)
            if (other := next(others, None)) is not None:
                yield run, other


def _run_id(run: Run) -> str | None:
    found = run.summary.get("run_id")
    return found if isinstance(found, str) else None


def _frozen(run: Run) -> str:
    return str(sorted((k, str(v)) for k, v in frozen_values(run.config).items() if not may_move(k)))


def _curve(run: Run) -> Hashable:
    losses = run.validations.get(LOSS, {})
    known = [*losses.values(), run.last_loss]
    return (tuple(sorted(losses.items())), run.last_loss) if losses and all(map(math.isfinite, known)) else None


def survived_at(runs: Sequence[Run]) -> str:
    """Return the keys that a search varied and of which it kept one value in `runs`: "KEY=VALUE, ...", "" if none."""
    keys: dict[str, None] = {}
    for folder in dict.fromkeys(run.folder.parent for run in runs):
        if ended_by_search(folder):
            keys |= dict.fromkeys(read_sweep_file(folder).get("axes", {}))
    shared = {key: {str(run.config.get(key)) for run in runs} for key in keys if key != "seed"}
    return ", ".join(
        f"{key}={values.pop()}"
        for key, values in shared.items()
        if len(values) == 1 and all(key in run.config for run in runs)
    )


def ended_some(runs: Sequence[Run]) -> bool:
    """Return whether a search stopped jobs of the runs' sweeps early, so that it chose which recipes are judged."""
    return any(ended_by_search(folder) for folder in {run.folder.parent for run in runs})


def unfinished_problems(runs: Iterable[Run], so: str = "Left out") -> list[Problem]:
    """Return problems that report unfinished runs: one per cause for the jobs of a sweep, one each for other runs.

    `so`: the consequence, as the beginning of the last sentence.
    """
    alike: dict[tuple[Path, str, str], list[Run]] = {}
    for run in runs:
        sweep = run.folder.parent
        place = sweep if (sweep / FILE).is_file() else run.folder
        alike.setdefault((place, status_of(run), _detail(run).partition(":")[0]), []).append(run)
    return [
        _of_one(found[0], so) if len(found) == 1 else _of_several(sweep, found, so)
        for (sweep, *_), found in alike.items()
    ]


def _detail(run: Run) -> str:
    """Return the first line of the recorded reason for the end of a run: "OSError: no space left"."""
    return (str(run.summary.get("detail") or "").splitlines() or [""])[0][:200]


def status_of(run: Run) -> str:
    """Return the status of an unfinished run as text; "killed, its process is gone" if no process runs it."""
    gone = run.status == "running" and state_of(run.folder) == "stopped"
    return KILLED if gone else run.status


def _of_one(run: Run, so: str) -> Problem:
    status, detail = status_of(run), _detail(run)
    after = f" after step {run.last_step}" if run.last_step else ""
    text = f"is not finished: {status}{after}{f' ({detail})' if detail else ''}. {so}"
    return Problem(str(run.folder), f"{text}{_further(resume_commands([run]), status, 'it')}.")


def _of_several(sweep: Path, runs: Sequence[Run], so: str) -> Problem:
    status, details = status_of(runs[0]), sorted({_detail(run) for run in runs} - {""})
    steps = sorted({run.last_step for run in runs})
    after = f" after step {steps[0] if len(steps) == 1 else f'{steps[0]} to {steps[-1]}'}" if steps[-1] else ""
    why = f" ({details[0]}{'; and others' if len(details) > 1 else ''})" if details else ""
    unfinished = f"{len(runs)} of its {_number_of_jobs(sweep)} jobs are not finished"
    reason, remedy = f"{status}{after}{why}", _further(resume_commands(runs), status, "them")
    return Problem(str(sweep), f"{unfinished} (jobs {_numbers(runs)}, numbered from 0): {reason}. {so}{remedy}.")


def _numbers(runs: Sequence[Run]) -> str:
    names = sorted((run.folder.name for run in runs), key=lambda name: (len(name), name))
    more = f" and {len(names) - MOST_NUMBERS} more" if len(names) > MOST_NUMBERS else ""
    return f"{', '.join(names[:MOST_NUMBERS])}{more}"


def _number_of_jobs(sweep: Path) -> int:
    try:
        return len(read_sweep_file(sweep).get("jobs", []))
    except ConfigError:  # `lost_jobs` reports it
        return len([each for each in sweep.iterdir() if each.name.isdecimal()])


def _further(command: str, status: str, them: str) -> str:
    if not command:
        return ""
    if status == UNREADABLE:
        return f"; {command} reruns {them} once the folder{'s are' if them == 'them' else ' is'} removed"
    return f"; {command} {'starts' if status == NOT_STARTED else 'resumes'} {them}"


def resume_commands(runs: Sequence[Run]) -> str:
    """Return the command that resumes or starts unfinished `runs`; "" if none is known or needed.

    A single run that began is resumed by its config, others with their sweep. Running runs and runs stopped by a search
    need no command.
    """
    runs = [run for run in runs if status_of(run) not in AS_THEY_ARE]
    if not runs:
        return ""
    alone = len(runs) == 1 and status_of(runs[0]) not in (NOT_STARTED, UNREADABLE)
    sweeps = dict.fromkeys(run.folder.parent for run in runs)
    of_sweeps = [] if alone else [command_for_the_rest(sweep) for sweep in sweeps]
    if of_sweeps and all(of_sweeps):
        return " && ".join(of_sweeps)
    has_config = all((run.folder / "config.yaml").is_file() for run in runs)
    return " && ".join(resume_command(run.folder) for run in runs) if has_config else ""


def levels_without_a_run(unfinished: Sequence[Run], usable: Sequence[Run], factor: Factor) -> list[Problem]:
    """Return a problem for each recipe of which no run is finished."""
    seen = {factor.level(run) for run in usable}
    values = [_value(run, factor) for run in usable]
    seeds: dict[str, set[int]] = {}
    for run in unfinished:
        name = _new_in_overrides(run, factor, values) if run.overrides else _new(run, factor, seen, values)
        if name:
            seeds.setdefault(name, set()).add(run.seed)
    text = "has no verdict: none of its runs is finished (seed{} {})."
    return [
        Problem(name, text.format("s" * (len(found) > 1), ", ".join(map(str, sorted(found)))))
        for name, found in seeds.items()
    ]


def _value(run: Run, factor: Factor) -> Any:
    """Return the name of the run's group, or its value of a factor with one key."""
    return run.config.get(factor.name, run.config.get(f"{factor.name}.name"))


def _new(run: Run, factor: Factor, seen: Collection[Level], names: Collection[Any]) -> str:
    """Return a name for the run's level, "" if it is one of `seen`: the name of its group, if unique."""
    if factor.level(run) in seen:
        return ""
    name = run.config.get(f"{factor.name}.name")
    return str(name) if name and name not in names else factor.in_words(run)


def _new_in_overrides(run: Run, factor: Factor, values: Sequence[Any]) -> str:
    """Return the level in a job's overrides; "" if they have none, or one of `values`.

    An override such as step_law may stand for any number.
    """
    overrides = [word.lstrip("+") for word in run.overrides if word.lstrip("+").startswith(f"{factor.name}=")]
    value = parsed(overrides[-1].partition("=")[2]) if overrides else None
    if not overrides or any(same_value(value, each) for each in values):
        return ""
    if "." not in factor.name:
        return str(value)
    is_law = isinstance(value, str) and not any(isinstance(each, str) for each in values)
    return "" if is_law else overrides[-1]
