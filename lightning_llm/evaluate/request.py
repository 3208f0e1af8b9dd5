"""Requests to `evaluate`, checked: every problem is reported at once, before weights are read."""

import importlib.util
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.config.compose import compose_config
from lightning_llm.config.overrides import override
from lightning_llm.config.recipes import option_files
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.data import LOADERS
from lightning_llm.data.check import check_data
from lightning_llm.evaluate.weights import check_dtype, check_members, tokenizer_of
from lightning_llm.plan.axes.axis import AXES
from lightning_llm.plan.check import INSTALL_EVALUATION, task_problems
from lightning_llm.plan.degrees import Degrees, resolve_degrees
from lightning_llm.plan.divisibility import sharding_problems
from lightning_llm.plan.nodes import with_reduction
from lightning_llm.run.code_weights import CODES
from lightning_llm.run.launch.environment import adopt_world
from lightning_llm.run.subject import Subject, device_of, find_subject
from lightning_llm.tracking.evaluations import read_evaluations

if TYPE_CHECKING:
    from lightning_llm.evaluate.harness import Tasks

LAYOUT_WORD = re.compile(r"(parallel(\.\w+)?|trainer\.devices|world)=.*", re.DOTALL)
"""An override of the layout; never matches a path."""
WHOLE_FILE_SHARE = 0.9
"""Share of the documents of --data KIND=FILE that is validated on; a corpus keeps the rest as training data."""


@dataclass(frozen=True)
class EvaluationRequest:
    """A checked request: the models (`subjects`), and `how` they are combined: "" (one model), "average", "ensemble".

    `validates`: whether to compute validation losses, on the first subject's data. `tasks`: lm-eval's tasks to run, or
    None; of each the first `limit` samples are used (below 1: that share of them; None: all), `batch_size` at once, in
    `compute_dtype` (None: that of the recipe). `degrees`: parallel degrees of the layout in the first subject's config.
    """

    subjects: list[Subject]
    how: str
    validates: bool
    tasks: "Tasks | None"
    device: torch.device
    limit: float | None
    batch_size: int
    compute_dtype: str | None
    degrees: Degrees
    codes: str | None = None
    """Evaluate the weights rounded to this format (one of `run.code_weights.CODES`); None: as they are."""

    @property
    def digest(self) -> str:
        """Hash of the weights, data, tasks and settings, 16 hex digits: equal requests have equal results."""
        files = [Path(word) for word in (self.tasks.names if self.tasks else ()) if Path(word).is_file()]
        own = self.subjects[0].config.data  # its global batch is that of the layout
        data = own.model_dump(mode="json", exclude={"global_batch_size"}) if self.validates else None
        texts = [Path(each["path"]) for each in (data or {}).get("sources", {}).values() if each.get("path")]
        about = {
            "weights": [subject.checkpoint.digest for subject in self.subjects if subject.checkpoint],
            "data": data,
            "text": [_changes(each) for each in texts],
            "tasks": [*(self.tasks.names if self.tasks else ()), *(_changes(each) for each in files)],
            "limit": self.limit,
            "compute_dtype": self.compute_dtype,
        }
        about |= {"codes": self.codes} if self.codes else {}
        return sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def members(self) -> list[str]:
        """The folders from which the weights of each model are read."""
        return [str(subject.weights.path) for subject in self.subjects]


def _changes(file: Path) -> list[Any]:
    """Return the facts of a file that change when it is written; [] if there is none of that name."""
    if not file.is_file():
        return []
    state = file.stat()
    return [str(file.resolve()), state.st_size, state.st_mtime_ns]


def checked_request(
    path: Path | None,
    *,
    tasks: Sequence[str] = (),
    tasks_only: bool = False,
    data: Sequence[str] = (),
    limit: float | None = None,
    average: Sequence[Path] = (),
    ensemble: Sequence[Path] = (),
    batch_size: int = 8,
    compute_dtype: str | None = None,
    device: str = "auto",
    layout: Sequence[str] = (),
    codes: str | None = None,
) -> EvaluationRequest:
    """Return the request that these arguments of the command line make (see `lightning-llm evaluate --help`).

    Raises:
        ConfigError: with every problem of the arguments and of the weights' folders.
    """
    names = [name for word in tasks for name in word.split(",") if name]
    problems = [*_number_problems(limit, batch_size), *_combination_problems(codes, bool(average), bool(ensemble))]
    if tasks_only and not names:
        problems.append(Problem("--tasks-only", "leaves nothing to do without --tasks. Add --tasks, or remove it."))
    paths = [*([path] if path else []), *average, *ensemble]
    if not paths:
        problems.append(Problem("PATH", "is missing. Name a run, a checkpoint or a Hugging Face folder."))
    subjects: list[Subject] = []
    validates, where, read, spreading, degrees = False, None, None, None, Degrees()
    with gathered(problems):
        subjects, validates = _subjects(paths, data, bool(names), bool(average), tasks_only)
    if codes in CODES:
        with gathered(problems):
            subjects = [each.as_codes(codes) for each in subjects]
    with gathered(problems):
        where = device_of(device)
        spreading = composed_layout(layout, device)
    if spreading is not None and subjects:
        with gathered(problems):
            config, degrees = spread(subjects[0].config, spreading)
            subjects[0] = replace(subjects[0], config=config)
            problems += task_problems(config, degrees) if names else []
    if degrees.world > 1 and ensemble:
        text = f"runs on one rank only, because a rank has all models, but there are {degrees.world}. Remove parallel=."
        problems.append(Problem("--ensemble", text))
    with gathered(problems):
        check_dtype(compute_dtype)
    with gathered(problems):
        read = read_tasks(names, read=bool(subjects)) if names else None
    if problems or where is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    how = "average" if average else "ensemble" if ensemble else ""
    how = how if len(subjects) > 1 else ""
    return EvaluationRequest(subjects, how, validates, read, where, limit, batch_size, compute_dtype, degrees, codes)


def _combination_problems(codes: str | None, average: bool, ensemble: bool) -> Iterator[Problem]:
    """Yield problems of a format of codes, and of options for several models that exclude each other."""
    if codes is not None and codes not in CODES:
        yield Problem("--as", f"must be one of {', '.join(CODES)}.", codes)
    elif codes is not None and (average or ensemble):
        yield Problem("--as", "evaluates one model. Remove --average or --ensemble.", codes)
    if average and ensemble:
        text = "cannot be used with --average: models are combined by weights or by predictions. Give one of the two."
        yield Problem("--ensemble", text)


def _number_problems(limit: float | None, batch_size: int) -> Iterator[Problem]:
    if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit % 1 == 0)):
        text = "must be a number of samples, or a fraction of them between 0 and 1, such as 0.5."
        yield Problem("--limit", text, f"{limit:g}")
    if batch_size < 1:
        yield Problem("--batch-size", "must be at least 1.", batch_size)


def _subjects(
    paths: Sequence[Path], data: Sequence[str], has_tasks: bool, same_shape: bool, tasks_only: bool
) -> tuple[list[Subject], bool]:
    """Return the models' subjects, the first with the data to validate on; and whether there are any to validate on."""
    problems: list[Problem] = []
    files, words = _data_words(data, problems)
    found: list[Subject | None] = [None] * len(paths)
    for index, path in enumerate(paths):
        with gathered(problems):
            found[index] = find_subject(path, words if index == 0 and not files else [], None, needs_data=False)
    subjects = [subject for subject in found if subject is not None]
    if subjects and len(subjects) == len(paths):
        with gathered(problems):
            check_members(subjects, same_shape=same_shape)
    validates = not tasks_only
    if subjects and found[0] is not None:
        first = subjects[0]
        if first.kind == "huggingface" and not files:
            validates = False
            problems += _missing_text(words, has_tasks)
        if files:
            with gathered(problems):
                first = _with_files(first, files, words)
        problems += check_data(first.config.data, first.config.model.vocab_size, 1) if validates else []
        if validates and not first.config.data.validation.fraction and not first.config.data.watched:
            text = "is 0, so there is no held-out text to validate on. Give --data jsonl=FILE, or --tasks-only."
            problems.append(Problem("data.validation.fraction", text))
        problems += _length_problems(subjects, first.config.data.sequence_length) if validates else []
        with gathered(problems):
            tokenizer_of(first)
        with gathered(problems):
            _check_results(first)
        subjects[0] = first
    if problems:
        raise ConfigError(problems)
    return subjects, validates


def _missing_text(words: Sequence[str], has_tasks: bool) -> Iterator[Problem]:
    """Yield problems of evaluating a Hugging Face folder without a file of text; tasks need none."""
    of_text = [word for word in words if not word.startswith("data.tokenizer.")]
    if of_text:
        text = f"sets {', '.join(of_text)}, but a Hugging Face folder has no text. Give a file, too: --data jsonl=FILE."
        yield Problem("--data", text)
    elif not has_tasks:
        text = "is missing, and a Hugging Face folder has no text. Give --data jsonl=FILE, or --tasks."
        yield Problem("--data", text)


def file_kinds() -> list[str]:
    """Return the kinds of files that --data KIND=FILE takes: "jsonl" and all others with a preset `data=KIND`."""
    return [loader for loader in LOADERS if LOADERS[loader].suffixes and loader in option_files("data")]


def _data_words(given: Sequence[str], problems: list[Problem]) -> tuple[dict[str, Path], list[str]]:
    """Return the files of --data KIND=FILE by kind, and overrides of --data KEY=VALUE, KEY below `data`."""
    files: dict[str, Path] = {}
    words, kinds = [], file_kinds()
    for word in given:
        key, equals, value = word.partition("=")
        if not equals or not key:
            problems.append(Problem("--data", f"'{word}' is not KEY=VALUE: jsonl=FILE, or a key below data."))
        elif key in kinds:
            files[key] = Path(value).expanduser().absolute()
        elif key in option_files("data"):
            text = f"'{key}' is not a kind of file. Allowed: {', '.join(kinds)}."
            problems.append(Problem("--data", text))
        else:
            words.append(f"data.{key}={value}")
    if len(files) > 1:
        problems.append(Problem("--data", f"names files of {len(files)} kinds ({', '.join(files)}). Give one."))
    return files, words


def _with_files(subject: Subject, files: Mapping[str, Path], words: Sequence[str]) -> Subject:
    """Return `subject` with the documents of files as its data; sequence length and tokenizer stay by default.

    The overrides `words` apply last to the data config. Raises ConfigError if they are invalid.
    """
    ((kind, file),) = files.items()
    own = subject.config.data
    tokenizer = [override(f"data.tokenizer.{key}", value) for key, value in own.tokenizer.model_dump().items()]
    whole = [f"data.validation.fraction={WHOLE_FILE_SHARE}", f"data.validation.sequences={10**6}"]
    source = [f"data={kind}", override(f"data.sources.{kind}.path", str(file))]
    made = compose_config([*source, *tokenizer, *whole, *words]).data
    typed = {word.partition("=")[0] for word in words}
    as_before = ("sequence_length", "micro_batch_size", "document_mask", "cache_dir")
    data = made.model_copy(update={key: getattr(own, key) for key in as_before if f"data.{key}" not in typed})
    return replace(subject, config=subject.config.model_copy(update={"data": data}))


def read_tasks(names: Sequence[str], read: bool = True) -> "Tasks | None":
    """Return the loaded tasks called `names`; with `read` false only check that they can be, and return None.

    Loading tasks takes seconds.

    Raises:
        ConfigError: lm-eval is not installed, or a task does not exist.
    """
    files = {name: Path(name).expanduser() for name in names if name.endswith((".yaml", ".yml"))}
    if missing := [Problem("--tasks", f"{file} is not a file.") for file in files.values() if not file.is_file()]:
        raise ConfigError(missing)
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(Problem("--tasks", f"needs lm-eval, which is not installed: {INSTALL_EVALUATION}"))
    if not read:
        return None
    from lightning_llm.evaluate.harness import Tasks

    return Tasks(names, files)


def _length_problems(subjects: Sequence[Subject], length: int) -> list[Problem]:
    """Return problems of models that do not take sequences of `length` tokens."""
    longest = {subject.folder: subject.config.model.max_sequence_length for subject in subjects}
    text = "takes at most {:,} tokens, but data.sequence_length is {:,}. Lower it: --data sequence_length={}."
    return [Problem(str(f), text.format(size, length, size)) for f, size in longest.items() if size < length]


def _check_results(subject: Subject) -> None:
    """Raise ConfigError where earlier results, which new ones are added to, are damaged."""
    try:
        read_evaluations(subject.folder)
    except ValueError as error:
        raise ConfigError(Problem(str(subject.folder), f"{error}.")) from error


def composed_layout(overrides: Sequence[str], accelerator: str) -> Config:
    """Return a config with the layout that `overrides` set: `parallel`, `trainer.devices` and `world`.

    Among the ranks of a launcher, `world` is their number.

    Raises:
        ConfigError: an override is invalid, or not one of the layout.
    """
    problems = [
        Problem(
            word,
            "cannot be overridden here. Allowed: parallel=NAME, parallel.KEY=VALUE, trainer.devices=N; data: --data.",
        )
        for word in overrides
        if not LAYOUT_WORD.fullmatch(word)
    ]
    if problems:
        raise ConfigError(problems)
    made = adopt_world(compose_config([*overrides, f"trainer.accelerator={accelerator}"]))
    if made.parallel.compile:
        raise ConfigError(Problem("parallel.compile", "is true, but evaluations are never compiled. Remove it."))
    return made


def spread(config: Config, made: Config) -> tuple[Config, Degrees]:
    """Return `config` with the layout of `made`, and the degrees of that layout.

    Nothing is trained: the global batch is the smallest that gives each pipeline stage a micro-batch.

    Raises:
        ConfigError: with every conflict between model and layout.
    """
    degrees = resolve_degrees(made.parallel, made.world or made.trainer.devices)
    data, trainer = config.data, made.trainer
    if degrees.world > 1:
        data = data.model_copy(update={"global_batch_size": data.micro_batch_size * degrees.dp * degrees.pp})
    spread_over = {"devices": trainer.devices, "accelerator": trainer.accelerator}
    changed = {
        "parallel": made.parallel,
        "trainer": config.trainer.model_copy(update=spread_over),
        "world": made.world,
        "data": data,
        "optim": made.optim,
    }
    whole = config.model_copy(update=changed)
    problems = [
        *(problem for axis in AXES.every().values() for problem in axis.layout_problems(whole, degrees, fits=True)),
        *sharding_problems(whole, degrees),
    ]
    if problems:
        raise ConfigError(problems)
    return with_reduction(whole, degrees), degrees
