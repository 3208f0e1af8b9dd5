"""What a user can get wrong, said so that they can mend it.

A message names the key, the value, what is allowed and what to change. Everything that is wrong is said at once, so
`ConfigError` carries a list. The command line prints it without a traceback and exits with 2.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches


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


class AgreedError(ConfigError):
    """A ConfigError that every rank raises alike: rank 0 prints it, and nobody else has to."""


class StorageError(Exception):
    """What a run leaves cannot be written any more: a full disk, a folder that became read-only. Exit code 1."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest of `known`, or the list of what is known where nothing is near."""
    known = sorted(known)
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    if near:
        return f" Did you mean '{near[0]}'?"
    return f" Known here: {', '.join(known)}." if known else ""
