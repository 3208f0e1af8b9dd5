"""Parse the arguments of --from: arm, seed and path of each log, from `ARM/SEED=PATH` or from --pattern.

An arm is one side of the comparison, such as "bf16".
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem, gathered

LABEL = re.compile(r"(?P<arm>[^=]+?)(?:/(?P<seed>[^/=]*))?=(?P<path>.+)", re.DOTALL)
FIELD = re.compile(r"\{(\w*)\}|(\*)")
URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/|(?:mlflow|file):|databricks(?:[:#]|$)")
"""Pattern of the beginning of a URI: a scheme of two letters or more, as in runs:/ID, or one of MLflow's."""
FIELDS = {"arm": r"(?P<arm>[^/]+)", "seed": r"(?P<seed>\d+)"}
PATTERN_EXAMPLE = "{arm}-{seed}.jsonl"
ARM_AND_SEED = re.compile(
    r"(?P<arm>.+?)(?P<between>[-_.=]?seed[-_.=]?|[-_.=])(?P<seed>\d+)(?P<rest>(?:\.[A-Za-z]\w*)*)"
)
"""A usual name of a log, such as "bf16-0.csv" or "mxfp8_seed1"."""


@dataclass(frozen=True)
class NamedLog:
    """One log to read: the `arm` to which it belongs, its `seed` (None if not known), its `address` (path or URI)."""

    arm: str
    seed: int | None
    address: str

    @property
    def label(self) -> str:
        """Arm and seed as text: "bf16/0", or "bf16" without a seed."""
        return self.arm if self.seed is None else f"{self.arm}/{self.seed}"


def pattern_for(path: Path) -> str:
    """Return a --pattern for logs with names such as the last parts of `path`, or else an example with its suffix."""
    if found := ARM_AND_SEED.fullmatch(path.name):
        return f"{{arm}}{found['between']}{{seed}}{found['rest']}"
    stem, dot, suffix = path.name.partition(".")
    return f"{{arm}}{'/' if stem.isdecimal() else '-'}{{seed}}{dot}{suffix}"


def logs_within(folder: Path) -> str:
    """Return the remedy for a folder that is no log itself: name what it contains, with a pattern."""
    first = _first(folder)
    if first is None:
        return "It is empty."
    glob = "*"
    if first.is_dir() and not ARM_AND_SEED.fullmatch(first.name):  # a folder per arm
        glob, first = "*/*", _first(first) or first
    if first.is_file() and not ARM_AND_SEED.fullmatch(first.name) and not first.stem.isdecimal():
        return f"If it contains the log of a run, name the file: {first.as_posix()}."
    return f"If its entries are logs, name them: --from {folder.as_posix()}/{glob} --pattern '{pattern_for(first)}'."


def _first(folder: Path) -> Path | None:
    """Return the first entry of a folder by name, without hidden ones."""
    return min((each for each in folder.glob("*") if not each.name.startswith(".")), default=None)


def real_path(address: str) -> str:
    """Return the absolute path without symbolic links. Links in a loop and unknown homes stay as they are."""
    return os.path.realpath(os.path.expanduser(address))


def is_uri(address: str) -> bool:
    """Return whether `address` is a URI, not a path."""
    return URI.match(address) is not None


def named_logs(arguments: Sequence[str], pattern: str | None = None) -> list[NamedLog]:
    """Return the logs that the arguments of --from name; `pattern` (--pattern): finds arm and seed in a bare path.

    Raises:
        ConfigError: with each argument that is invalid, names a path twice, or has the arm and seed of another.
    """
    problems: list[Problem] = []
    template = None
    with gathered(problems):
        template = None if pattern is None else _compiled(pattern)
    if problems:
        raise ConfigError(problems)
    logs: list[NamedLog] = []
    for word in arguments:
        with gathered(problems):
            logs.append(_named(word, pattern, template))
    problems += _repeated(logs)
    if problems:
        raise ConfigError(problems)
    return logs


def _named(word: str, pattern: str | None, template: re.Pattern[str] | None) -> NamedLog:
    found = None if Path(os.path.expanduser(word)).exists() else LABEL.fullmatch(word)
    if found and not is_uri(word):
        return NamedLog(found["arm"], _seed(word, found["seed"]), found["path"])
    if template is None and is_uri(word):
        raise ConfigError(Problem(word, "has no arm. Name it ARM/SEED=URI, such as bf16/0=runs:/ID."))
    if template is None:
        return NamedLog(Path(real_path(word)).parent.name or "logs", None, word)
    matched = template.search(Path(word).as_posix())
    if matched is None:
        hint = f", for example to '{pattern_for(Path(word))}'" if ARM_AND_SEED.fullmatch(Path(word).name) else ""
        text = f"does not match --pattern {pattern}. Name it ARM/SEED=PATH, or change the pattern{hint}."
        raise ConfigError(Problem(word, text))
    seed = matched.groupdict().get("seed")
    return NamedLog(matched["arm"], None if seed is None else int(seed), word)


def _seed(word: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not re.fullmatch(r"\d+", text):
        raise ConfigError(Problem(word, f"the seed '{text}' is no integer. Write ARM/SEED=PATH, such as bf16/0=a.csv."))
    return int(text)


def _compiled(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern, which matches the last parts of a path."""
    parts, end, seen = [], 0, []
    for found in FIELD.finditer(pattern):
        name = found[1]
        parts.append(re.escape(pattern[end : found.start()]))
        if found[2]:
            parts.append("[^/]*")
        elif name in FIELDS and name not in seen:
            parts.append(FIELDS[name])
            seen.append(name)
        else:
            text = f"has {{{name}}}. Allowed are {{arm}} and {{seed}}, once each, and *. Example: {PATTERN_EXAMPLE}"
            raise ConfigError(Problem("--pattern", text, pattern))
        end = found.end()
    if "arm" not in seen:
        text = f"has no {{arm}}, so the arms are not known. Example: {PATTERN_EXAMPLE}"
        raise ConfigError(Problem("--pattern", text, pattern))
    return re.compile(f"(?:^|/){''.join(parts)}{re.escape(pattern[end:])}$")


def _repeated(logs: Iterable[NamedLog]) -> list[Problem]:
    """Return the problems of logs that are named twice, and of seeds that an arm has twice."""
    problems: list[Problem] = []
    by_label: dict[tuple[str, int], NamedLog] = {}
    by_place: dict[str, NamedLog] = {}
    for log in logs:
        place = log.address if is_uri(log.address) else real_path(log.address)
        first = by_place.setdefault(place, log)
        if first is not log:
            text = (
                f"is named twice, as {first.label} and as {log.label}. A log belongs to one arm and seed: remove one."
            )
            problems.append(Problem(log.address, text))
        elif log.seed is not None and (other := by_label.setdefault((log.arm, log.seed), log)) is not log:
            text = f"the seed occurs twice, in {other.address} and {log.address}. Give each run of an arm its own seed."
            problems.append(Problem(log.label, text))
    return problems + mixed_seeds(logs)


def mixed_seeds(logs: Iterable[NamedLog]) -> list[Problem]:
    """Return a problem for each log without a seed, if other logs have one."""
    unknown = [log for log in logs if log.seed is None]
    if not unknown or all(log.seed is None for log in logs):
        return []
    text = "has no seed, but other logs have one. Name all as ARM/SEED=PATH, or none with a seed."
    return [Problem(log.address, text) for log in unknown]
