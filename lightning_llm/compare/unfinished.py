"""Runs that did not come to their end: a line per cause, and the command that goes on with them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_llm.compare.factor import Factor
from lightning_llm.config.commands import resume_command
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.record.reading import Run
from lightning_llm.record.state import state_of
from lightning_llm.record.sweep_commands import command_for_the_rest
from lightning_llm.record.sweep_file import FILE, read_sweep_file

NEVER_BEGUN = "never begun"
UNREADABLE = "unreadable"
KILLED = "killed, its process is gone"
AS_THEY_ARE = ("running", "ended early")
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
        alike.setdefault((place, _status(run), _detail(run).partition(":")[0]), []).append(run)
    return [
        _of_one(found[0], so) if len(found) == 1 else _of_several(sweep, found, so)
        for (sweep, *_), found in alike.items()
    ]


def _detail(run: Run) -> str:
    """Return the first line of what a run said of its end: "OSError: no space left"."""
    return (str(run.summary.get("detail") or "").splitlines() or [""])[0][:200]


def _status(run: Run) -> str:
    gone = run.status == "running" and state_of(run.folder) == "stopped"
    return KILLED if gone else run.status


def _of_one(run: Run, so: str) -> Problem:
    status, detail = _status(run), _detail(run)
    after = f" after step {run.last_step}" if run.last_step else ""
    text = f"is not finished: {status}{after}{f' ({detail})' if detail else ''}. {so}"
    return Problem(str(run.folder), f"{text}{_further(how_they_go_on([run]), status, 'it')}.")


def _of_several(sweep: Path, runs: Sequence[Run], so: str) -> Problem:
    status, details = _status(runs[0]), sorted({_detail(run) for run in runs} - {""})
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
    if not command or status in AS_THEY_ARE:
        return ""
    if status == UNREADABLE:
        return f"; {command} makes {them} anew once the folder{'s are' if them == 'them' else ' is'} removed"
    return f"; {command} {'begins' if status == NEVER_BEGUN else 'goes on with'} {them}"


def how_they_go_on(runs: Sequence[Run]) -> str:
    """Return the command that goes on with unfinished `runs`, or begins them; "" where none is known.

    One run that began goes on by its config, others with their sweep.
    """
    alone = len(runs) == 1 and _status(runs[0]) not in (NEVER_BEGUN, UNREADABLE)
    sweeps = dict.fromkeys(run.folder.parent for run in runs)
    of_sweeps = [] if alone else [command_for_the_rest(sweep) for sweep in sweeps]
    if of_sweeps and all(of_sweeps):
        return " && ".join(of_sweeps)
    has_config = all((run.folder / "config.yaml").is_file() for run in runs)
    return " && ".join(resume_command(run.folder) for run in runs) if has_config else ""


def levels_without_a_run(unfinished: Sequence[Run], usable: Sequence[Run], factor: Factor) -> list[Problem]:
    """Say of which recipes there is no verdict at all, since no run of theirs came to its end."""
    seen = {factor.level(run) for run in usable}
    named = {_name(run, factor) for run in usable}
    seeds: dict[str, set[int]] = {}
    for run in unfinished:
        name = _name_in_words(run, factor) if run.words else _name(run, factor)
        if name and (name not in named if run.words else factor.level(run) not in seen):
            seeds.setdefault(name, set()).add(run.seed)
    text = "has no verdict: none of its runs is finished (seed{} {})."
    return [
        Problem(name, text.format("s" * (len(found) > 1), ", ".join(map(str, sorted(found)))))
        for name, found in seeds.items()
    ]


def _name(run: Run, factor: Factor) -> str:
    return str(run.config.get(f"{factor.name}.name") or run.config.get(factor.name) or run.name)


def _name_in_words(run: Run, factor: Factor) -> str:
    """Return the recipe that the words of a job name, "" where they name none."""
    values = [word.partition("=")[2] for word in run.words if word.startswith(f"{factor.name}=")]
    return values[-1] if values else ""
