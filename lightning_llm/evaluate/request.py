"""What `evaluate` is asked for, checked: all that is wrong is said at once, before weights are read."""

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_llm.config.compose import compose_config
from lightning_llm.config.recipes import option_files
from lightning_llm.data.check import check_data
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.evaluate.members import check_members
from lightning_llm.evaluate.weights import check_dtype, device_of, tokenizer_of
from lightning_llm.probe.subject import Subject, find_subject
from lightning_llm.record.evaluations import read_evaluations

INSTALL = "pip install 'lightning-llm[eval]'"
WHOLE_FILE_SHARE = 0.9
"""Of the documents of --data KIND=FILE: all but a tenth, which a corpus keeps to train on."""


@dataclass(frozen=True)
class Request:
    """`subjects` of the models; `how` they are one: "" (there is one), "average" or "ensemble".

    `validates`: whether losses are wanted, of the first subject's data; `tasks`: a `harness.Tasks`, or None, of which
    the first `limit` samples are taken, `batch_size` at once, in `compute_dtype`.
    """

    subjects: list[Subject]
    how: str
    validates: bool
    tasks: Any
    device: torch.device
    limit: int | None
    batch_size: int
    compute_dtype: str | None

    @property
    def members(self) -> list[str]:
        """The folders that weights are read from."""
        return [
            str(subject.folder if subject.checkpoint is None else subject.checkpoint.folder)
            for subject in self.subjects
        ]


def checked_request(
    path: Path | None,
    *,
    tasks: Sequence[str] = (),
    tasks_only: bool = False,
    data: Sequence[str] = (),
    limit: int | None = None,
    average: Sequence[Path] = (),
    ensemble: Sequence[Path] = (),
    batch_size: int = 8,
    compute_dtype: str | None = None,
    device: str = "auto",
) -> Request:
    """Return what is asked for, in the words of the command line (`lightning-llm evaluate --help`).

    Raises:
        ConfigError: with all that is wrong.
    """
    problems: list[Problem] = []
    for key, value in (("--limit", limit), ("--batch-size", batch_size)):
        if value is not None and value < 1:
            problems.append(Problem(key, f"is {value}, must be at least 1."))
    if average and ensemble:
        text = "goes without --average: models are made one by their weights or by what they predict."
        problems.append(Problem("--ensemble", text))
    names = [name for word in tasks for name in word.split(",") if name]
    if tasks_only and not names:
        problems.append(Problem("--tasks-only", "leaves nothing to do: no --tasks were given."))
    paths = [*([path] if path else []), *average, *ensemble]
    if not paths:
        problems.append(Problem("PATH", "is missing. Name a run, a checkpoint or a Hugging Face folder."))
    made = _gathered(problems, lambda: _subjects(paths, data, bool(names), bool(average), tasks_only))
    subjects, validates = made or ([], False)
    where = _gathered(problems, lambda: device_of(device))
    _gathered(problems, lambda: check_dtype(compute_dtype))
    read = _gathered(problems, lambda: _tasks(names, read=made is not None)) if names else None
    if problems or where is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    how = "average" if average else "ensemble" if ensemble else ""
    return Request(subjects, how if len(subjects) > 1 else "", validates, read, where, limit, batch_size, compute_dtype)


def _gathered(problems: list[Problem], find: Callable[[], Any]) -> Any:
    """Return what `find` does; where it raises ConfigError, None, and `problems` has them."""
    try:
        return find()
    except ConfigError as error:
        problems += error.problems
        return None


def _subjects(
    paths: Sequence[Path], data: Sequence[str], has_tasks: bool, same_shape: bool, tasks_only: bool
) -> tuple[list[Subject], bool]:
    """Return the models' subjects, the first with the data to validate on; and whether there are any to validate on."""
    problems: list[Problem] = []
    files, words = _data_words(data, problems)
    found = [
        _gathered(problems, partial(find_subject, path, words if index == 0 else [], None, needs_data=False))
        for index, path in enumerate(paths)
    ]
    subjects = [subject for subject in found if subject is not None]
    if subjects and len(subjects) == len(paths):
        _gathered(problems, lambda: check_members(subjects, same_shape=same_shape))
    validates = not tasks_only
    if subjects and found[0] is not None:
        first = subjects[0]
        if first.kind == "huggingface" and not data:
            validates = False
            if not has_tasks:
                text = "is missing: a Hugging Face folder brings no text. Give --data jsonl=FILE, or --tasks."
                problems.append(Problem("--data", text))
        if files:
            first = _gathered(problems, lambda: _with_files(first, files)) or first
        problems += check_data(first.config.data, first.config.model.vocab_size, 1) if validates else []
        if validates and not first.config.data.validation.fraction and not first.config.data.watched:
            text = "is 0: nothing was held out to validate on. Give --data jsonl=FILE, or --tasks-only."
            problems.append(Problem("data.validation.fraction", text))
        problems += _length_problems(subjects, first.config.data.sequence_length) if validates else []
        _gathered(problems, lambda: tokenizer_of(first))
        _gathered(problems, lambda: _check_results(first))
        subjects[0] = first
    if problems:
        raise ConfigError(problems)
    return subjects, validates


FILE_KINDS = ("jsonl", "text", "parquet", "megatron", "olmo")
"""Options of the group `data` with one source of files, which has their name."""


def _data_words(given: Sequence[str], problems: list[Problem]) -> tuple[dict[str, Path], list[str]]:
    """Return the files of --data KIND=FILE by kind, and overrides of --data KEY=VALUE, KEY below `data`."""
    files: dict[str, Path] = {}
    words = []
    for word in given:
        key, equals, value = word.partition("=")
        if not equals or not key:
            problems.append(Problem("--data", f"'{word}' is no KEY=VALUE: jsonl=FILE, or a key below data."))
        elif key in FILE_KINDS:
            files[key] = Path(value).expanduser().absolute()
        elif key in option_files("data", None):
            text = f"'{key}' is no kind of file: these are {', '.join(FILE_KINDS)}."
            problems.append(Problem("--data", text))
        else:
            words.append(f"data.{key}={value}")
    if len(files) > 1:
        problems.append(Problem("--data", f"names files of {len(files)} kinds ({', '.join(files)}). Give one."))
    return files, words


def _with_files(subject: Subject, files: dict[str, Path]) -> Subject:
    """Return `subject` with a file's documents instead of its data, as many tokens at once, by its own tokenizer."""
    ((kind, file),) = files.items()
    own = subject.config.data
    tokenizer = [f"data.tokenizer.{key}={json.dumps(value)}" for key, value in own.tokenizer.model_dump().items()]
    made = compose_config([f"data={kind}", f"data.sources.{kind}.path='{file}'", *tokenizer]).data
    kept = ("tokenizer", "sequence_length", "micro_batch_size", "document_mask", "cache_dir")
    whole = made.validation.model_copy(update={"fraction": WHOLE_FILE_SHARE, "sequences": 10**6})
    data = made.model_copy(update={key: getattr(own, key) for key in kept} | {"validation": whole})
    return replace(subject, config=subject.config.model_copy(update={"data": data}))


def _tasks(names: Sequence[str], read: bool) -> Any:
    """Return the tasks; where the rest is wrong anyway they are not `read`, which takes seconds, but looked for."""
    files = {name: Path(name).expanduser() for name in names if name.endswith((".yaml", ".yml"))}
    if missing := [Problem("--tasks", f"{file} is no file.") for file in files.values() if not file.is_file()]:
        raise ConfigError(missing)
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(Problem("--tasks", f"needs lm-eval, which is not installed: {INSTALL}"))
    if not read:
        return None
    from lightning_llm.evaluate.harness import Tasks

    return Tasks(names, files)


def _length_problems(subjects: Sequence[Subject], length: int) -> list[Problem]:
    """Return which models do not take sequences of `length` tokens."""
    longest = {subject.folder: subject.config.model.max_sequence_length for subject in subjects}
    text = "takes {:,} tokens, and data.sequence_length is {:,}. Lower it: --data sequence_length={}."
    return [Problem(str(f), text.format(size, length, size)) for f, size in longest.items() if size < length]


def _check_results(subject: Subject) -> Any:
    try:
        return read_evaluations(subject.folder)
    except ValueError as error:
        raise ConfigError(Problem(str(subject.folder), f"{error}.")) from error
