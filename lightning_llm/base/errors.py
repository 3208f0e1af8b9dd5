"""Errors reported to users.

A message names the key, the value, the allowed values and the remedy. All problems are reported at once, so
`ConfigError` carries a list. The command line prints it without a traceback and exits with 2.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

MOST_MEANT = 6
"""Maximum number of suggestions for an incomplete name."""


@dataclass(frozen=True)
class Problem:
    """One problem, printed as `key=value: text`.

    `key`: dotted config key, path or flag; `text`: the problem, what is allowed and the remedy; `value`: None if it is
    not known or part of the text.
    """

    key: str
    text: str
    value: object = None

    def __str__(self) -> str:
        return f"{self.key}{'' if self.value is None else f'={self.value}'}: {self.text}"


class ConfigError(Exception):
    """The config or an input is wrong: nothing was started and nothing written. Exit code 2."""

    def __init__(self, problems: Iterable[Problem] | Problem):
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[Problem]]]:
        return type(self), (self.problems,)  # it is sent between ranks; the default would lose the problems


@contextmanager
def gathered(problems: list[Problem]) -> Iterator[None]:
    """Context that adds the problems of a ConfigError to the list `problems` instead of raising it."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


class AgreedError(ConfigError):
    """ConfigError that is raised on every rank and printed only by rank 0."""


class CallbackFailedError(Exception):
    """A callback of the config raised an exception or exited. Exit code 1."""


class Terminated(KeyboardInterrupt):
    """Signal `number` asked the process to end, and no state is left to save. Exit code 128 + `number`."""

    def __init__(self, number: int = signal.SIGTERM):
        self.number = number
        super().__init__(signal.Signals(number).name)

    def __reduce__(self) -> tuple[type["Terminated"], tuple[int]]:
        return type(self), (self.number,)


class RunFailedError(Exception):
    """A run started from Python failed; summary.json in `folder` has the reason, too. Exit code 1."""

    def __init__(self, folder: Path, detail: str):
        self.folder = folder
        self.detail = detail
        super().__init__(f"the run in {folder} failed: {detail}")

    def __reduce__(self) -> tuple[type["RunFailedError"], tuple[Path, str]]:
        return type(self), (self.folder, self.detail)


class RanksFailedError(Exception):
    """Ranks of a command failed (already reported on stderr). Exit code `code`."""

    def __init__(self, code: int, detail: str):
        self.code = code
        self.detail = detail
        super().__init__(detail)

    def __reduce__(self) -> tuple[type["RanksFailedError"], tuple[int, str]]:
        return type(self), (self.code, self.detail)


class UnhealthyError(Exception):
    """Ranks or their machines are not fit to train: wrong results, a slow or a missing rank. Exit code 1.

    `reports`: whether this rank, of all that raise it, prints the error. `stopped`: ids of stopped processes on this
    machine that it waited for; a launcher's SIGTERM does not reach them.
    """

    def __init__(self, text: str, reports: bool, stopped: tuple[int, ...] = ()):
        self.text, self.reports, self.stopped = text, reports, stopped
        super().__init__(text)

    def __reduce__(self) -> tuple[type["UnhealthyError"], tuple[str, bool, tuple[int, ...]]]:
        return type(self), (self.text, self.reports, self.stopped)

    def end_stopped(self) -> None:
        """Kill the stopped processes. Call this last, since a launcher then ends all other ranks."""
        for number in self.stopped:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


class StorageError(Exception):
    """The run's files cannot be written: the disk is full or the folder is read-only. Exit code 1."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about the unknown name `word`: " Did you mean 'x'?", or the list of known names.

    Suggested are names in `known` that begin with `word`, have the same parts, or are spelled similarly. If there is
    none, all names are listed; for "sweep/nope" only those in the folder `sweep`.
    """
    known = sorted(known)
    folder = word[: word.rfind("/") + 1]
    inside = [each for each in known if each.startswith(folder)]
    if folder and inside:
        names = [each.removeprefix(folder) for each in inside]
        near = [folder + each for each in _near(word.removeprefix(folder), names)]
        known = inside
    else:
        near = _near(word, known)
    if near and len(near) <= MOST_MEANT:
        *others, last = map(repr, near)
        return f" Did you mean {', '.join(others)}{' or ' if others else ''}{last}?"
    return f" Known here: {', '.join(known)}." if known else ""


def _near(word: str, known: list[str]) -> list[str]:
    parts = sorted(word.split("_"))
    return (
        [each for each in known if word and each.startswith(word)]
        or [each for each in known if sorted(each.split("_")) == parts]
        or get_close_matches(word, known, n=1, cutoff=0.6)
    )
