"""Runs that did not come to their end: a line per cause, and the command that goes on with them."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.compare.runs.factor import Factor
from lightning_llm.compare.runs.levels import Level, parsed, same_value
from lightning_llm.config.commands import resume_command
from lightning_llm.tracking.reading import Run
from lightning_llm.tracking.run_state import state_of
from lightning_llm.tracking.sweep_definition import command_for_the_rest
from lightning_llm.tracking.sweep_file import FILE, read_sweep_file

NEVER_BEGUN = "never begun"
UNREADABLE = "unreadable"
KILLED = "killed, its process is gone"
RUNNING, ENDED_EARLY = "running", "ended early"
AS_THEY_ARE = (RUNNING, ENDED_EARLY)
"""States of runs that nothing is to be done about."""
MOST_NUMBERS = 8
"""Of jobs that are named one by one."""


def unfinished_problems(runs: Iterable[Run], so: str = "Left out") -> list[Problem]:
    """Return what to say of unfinished runs: of a sweep's jobs a line per cause, of other runs one for each.

    Args:
        so: what becomes of them.
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
    """Return the first line of what a run said of its end: "OSError: no space left"."""
    return (str(run.summary.get("detail") or "").splitlines() or [""])[0][:200]


def status_of(run: Run) -> str:
    """Return what an unfinished run is: what it said of itself, and that it was killed where its process is gone."""
    gone = run.status == "running" and state_of(run.folder) == "stopped"
    return KILLED if gone else run.status


def _of_one(run: Run, so: str) -> Problem:
    status, detail = status_of(run), _detail(run)
    after = f" after step {run.last_step}" if run.last_step else ""
    text = f"is not finished: {status}{after}{f' ({detail})' if detail else ''}. {so}"
    return Problem(str(run.folder), f"{text}{_further(how_they_go_on([run]), status, 'it')}.")


def _of_several(sweep: Path, runs: Sequence[Run], so: str) -> Problem:
    status, details = status_of(runs[0]), sorted({_detail(run) for run in runs} - {""})
    steps = sorted({run.last_step for run in runs})
    after = f" after step {steps[0] if len(steps) == 1 else f'{steps[0]} to {steps[-1]}'}" if steps[-1] else ""
    why = f" ({details[0]}{'; and others' if len(details) > 1 else ''})" if details else ""
    text = f"{len(runs)} of its {_number_of_jobs(sweep)} jobs are not finished: {status}{after}{why}"
    text += f", jobs {_numbers(runs)} (numbered from 0). {so}"
    return Problem(str(sweep), f"{text}{_further(how_they_go_on(runs), status, 'them')}.")


def _numbers(runs: Sequence[Run]) -> str:
    names = sorted((run.folder.name for run in runs), key=lambda name: (len(name), name))
    more = f" and {len(names) - MOST_NUMBERS} more" if len(names) > MOST_NUMBERS else ""
    return f"{', '.join(names[:MOST_NUMBERS])}{more}"


def _number_of_jobs(sweep: Path) -> int:
    try:
        return len(read_sweep_file(sweep).get("jobs", []))
    except ConfigError:  # which `lost_jobs` says
        return len([each for each in sweep.iterdir() if each.name.isdecimal()])


def _further(command: str, status: str, them: str) -> str:
    if not command:
        return ""
    if status == UNREADABLE:
        return f"; {command} makes {them} anew once the folder{'s are' if them == 'them' else ' is'} removed"
    return f"; {command} {'begins' if status == NEVER_BEGUN else 'goes on with'} {them}"


def how_they_go_on(runs: Sequence[Run]) -> str:
    """Return the command that goes on with unfinished `runs`, or begins them; "" where none is known, or needed.

    One run that began goes on by its config, others with their sweep; those that are running do so by themselves, and
    those that a search ended are not to.
    """
    runs = [run for run in runs if status_of(run) not in AS_THEY_ARE]
    if not runs:
        return ""
    alone = len(runs) == 1 and status_of(runs[0]) not in (NEVER_BEGUN, UNREADABLE)
    sweeps = dict.fromkeys(run.folder.parent for run in runs)
    of_sweeps = [] if alone else [command_for_the_rest(sweep) for sweep in sweeps]
    if of_sweeps and all(of_sweeps):
        return " && ".join(of_sweeps)
    has_config = all((run.folder / "config.yaml").is_file() for run in runs)
    return " && ".join(resume_command(run.folder) for run in runs) if has_config else ""


def levels_without_a_run(unfinished: Sequence[Run], usable: Sequence[Run], factor: Factor) -> list[Problem]:
    """Say of which recipes there is no verdict at all, since no run of theirs came to its end."""
    seen = {factor.level(run) for run in usable}
    values = [_value(run, factor) for run in usable]
    seeds: dict[str, set[int]] = {}
    for run in unfinished:
        name = _new_in_words(run, factor, values) if run.words else _new(run, factor, seen, values)
        if name:
            seeds.setdefault(name, set()).add(run.seed)
    text = "has no verdict: none of its runs is finished (seed{} {})."
    return [
        Problem(name, text.format("s" * (len(found) > 1), ", ".join(map(str, sorted(found)))))
        for name, found in seeds.items()
    ]


def _value(run: Run, factor: Factor) -> Any:
    """Return the name of the run's group, or its value of a factor that is one key."""
    return run.config.get(factor.name, run.config.get(f"{factor.name}.name"))


def _new(run: Run, factor: Factor, seen: Collection[Level], names: Collection[Any]) -> str:
    """Return what to call the run's level, "" where it is one of `seen`: its group's name, where no other has it."""
    if factor.level(run) in seen:
        return ""
    name = run.config.get(f"{factor.name}.name")
    return str(name) if name and name not in names else factor.in_words(run)


def _new_in_words(run: Run, factor: Factor, values: Sequence[Any]) -> str:
    """Return the level that the words of a job name, as they do; "" where they name none, or one of `values`.

    A word for a number (step_law) may stand for any.
    """
    words = [word.lstrip("+") for word in run.words if word.lstrip("+").startswith(f"{factor.name}=")]
    value = parsed(words[-1].partition("=")[2]) if words else None
    if not words or any(same_value(value, each) for each in values):
        return ""
    if "." not in factor.name:
        return str(value)
    is_law = isinstance(value, str) and not any(isinstance(each, str) for each in values)
    return "" if is_law else words[-1]
