"""Errors of users, reported so that they can be fixed.

A message names the key, the value, what is allowed and what to change. Everything that is wrong is reported at once, so
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
"""Of names that a shorter one may mean."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: `key` is the dotted config key, a path or a flag; `text` a full sentence or two."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


class ConfigError(Exception):
    """The config or an input is wrong: nothing was started and nothing written. Exit code 2."""

    def __init__(self, problems: Iterable[Problem] | Problem):
        self.problems = [problems] if isinstance(problems, Problem) else list(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type["ConfigError"], tuple[list[Problem]]]:
        return type(self), (self.problems,)  # it goes from rank to rank; an exception's own way loses its problems


@contextmanager
def gathered(problems: list[Problem]) -> Iterator[None]:
    """Run the block; the problems of a ConfigError that it raises are added to `problems`, and what follows goes on."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


class AgreedError(ConfigError):
    """A ConfigError that every rank raises alike: rank 0 prints it, and nobody else has to."""


class CallbackFailedError(Exception):
    """A callback of the config raised something, or ended the process. Exit code 1."""


class Terminated(KeyboardInterrupt):
    """A signal that asks to end, `number`, came where nothing has to be saved, or all is. Exit code 128 + `number`."""

    def __init__(self, number: int = signal.SIGTERM):
        self.number = number
        super().__init__(signal.Signals(number).name)

    def __reduce__(self) -> tuple[type["Terminated"], tuple[int]]:
        return type(self), (self.number,)


class RunFailedError(Exception):
    """A run that was started from Python failed; why stands in `folder`'s summary.json, too. Exit code 1."""

    def __init__(self, folder: Path, detail: str):
        self.folder = folder
        self.detail = detail
        super().__init__(f"the run in {folder} failed: {detail}")

    def __reduce__(self) -> tuple[type["RunFailedError"], tuple[Path, str]]:
        return type(self), (self.folder, self.detail)


class RanksFailedError(Exception):
    """Ranks that were started for a command failed; what they had to say is said. Exit code `code`."""

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
        """Kill those processes. To be called last: a launcher that sees one gone ends all others."""
        for number in self.stopped:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)


class StorageError(Exception):
    """What a run leaves cannot be written any more: a full disk, a folder that became read-only. Exit code 1."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for those of `known` that `word` begins, has the parts of, or is nearest to.

    Where nothing is near, the list of what is known; of a folder that is ("sweep/nope") what lies in it, since a folder
    in common makes no two names alike.
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
