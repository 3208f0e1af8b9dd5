"""The verb `prepare`: tokenize the data of a config in advance, or score its documents."""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import yaml
from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.base.folders import output_file_problems
from lightning_llm.base.terminal import new_console
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.data import SCORERS, Measure, ScorerConfig
from lightning_llm.config.schema.validation import gather
from lightning_llm.config.workspace import command, config_dir_arguments
from lightning_llm.data.check import data_rules
from lightning_llm.data.opening import open_corpus
from lightning_llm.data.report import account_lines, source_reports
from lightning_llm.data.scoring import score_documents
from lightning_llm.run.checked_plan import read_config
from lightning_llm.run.resume.weights import unnamed_problems

MEASURES: tuple[Measure, ...] = get_args(Measure)
SCORES = Path("scores.parquet")


def prepare(arguments: argparse.Namespace) -> int:
    """Tokenize the data of a config into the cache, or with --score write a table of document scores; return 0.

    Raises:
        ConfigError: the config, the scorers or the output are invalid.
    """
    given = [word for word in arguments.score or () if _is_of_scores(word)]
    overrides = [*arguments.overrides, *(each for each in arguments.score or () if not _is_of_scores(each))]
    reading = read_config(overrides, arguments.config, arguments.config_dir)
    problems = list(reading.problems)
    scorers = chosen_scorers(given, problems) if arguments.score is not None else {}
    problems += _output_problems(arguments)
    config = reading.config
    if config is not None:
        problems += gather(data_rules(lambda: config.data, lambda: config.model.vocab_size, lambda: 1))
        problems += gather([lambda: unnamed_problems(config)])
        problems += _of_tokens(config) if arguments.score is not None else []
    if problems or config is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    if arguments.score is not None:
        return _score(config, scorers, overrides, arguments)
    data = config.data
    corpus = open_corpus(data, config.seed, config.model.vocab_size, config.trainer.max_steps, progress=True)
    facts = {
        each.name: {
            "training_tokens": each.available_tokens,
            "documents": each.documents,
            "validation_tokens": each.validation_tokens,
            "left_out": corpus.accounts[each.name].blank_records,
        }
        for each in source_reports(corpus, 0)
    }
    if arguments.json:
        accounts = {name: {"account": account.facts()} for name, account in corpus.accounts.items()}
        sources = {name: its | accounts[name] for name, its in facts.items()}
        print(json.dumps({"sources": sources, "data_hash": corpus.fingerprint}, indent=1))
        return 0
    for name, its in facts.items():
        counts = ", ".join(f"{value:,} {key.replace('_', ' ')}" for key, value in its.items())
        print(f"{name}: {counts}")
    for line in account_lines(corpus):
        print(line)
    print(f"data_hash {corpus.fingerprint}")
    return 0


def _is_of_scores(word: str) -> bool:
    return word.partition("=")[0].partition(".")[0] in MEASURES


def chosen_scorers(given: Sequence[str], problems: list[Problem]) -> dict[Measure, ScorerConfig]:
    """Return {measure: scorer} for the arguments of `--score`: MEASURE=KIND and MEASURE.KEY=VALUE.

    Problems are added to `problems`.
    """
    kinds: dict[str, dict[str, Any]] = {}
    for word in given:
        key, equals, value = word.partition("=")
        measure, _, option = key.partition(".")
        if not equals:
            text = "must have the form MEASURE=SCORER, such as quality=length_entropy."
            problems.append(Problem(f"--score {word}", text))
            continue
        if (option or "kind") in kinds.setdefault(measure, {}):
            problems.append(Problem("--score", f"{key} is given twice. Give it once."))
        kinds[measure][option or "kind"] = _value_of(value)
    if not kinds and not problems:
        known = ", ".join(f"{SCORERS[name].measures}={name}" for name in SCORERS)
        problems.append(Problem("--score", f"needs a scorer. Choose from {known}."))
    scorers: dict[Measure, ScorerConfig] = {}
    for measure in MEASURES:
        if (values := kinds.get(measure)) is None:
            continue
        fitting = [name for name in SCORERS if SCORERS[name].measures == measure]
        name = values.get("kind")
        if name not in fitting:
            known = did_you_mean(str(name), fitting)
            text = f"{measure}={name}: unknown scorer.{known}"
            if name is None:
                text = f"{measure} has keys but no scorer. Add one, for example {measure}={fitting[0]}."
            problems.append(Problem("--score", text))
            continue
        try:
            scorers[measure] = TypeAdapter(SCORERS[name]).validate_python(values)
            problems += scorers[measure].problems(f"--score {measure}={name}")
        except ValidationError as error:
            problems += [
                Problem(f"--score {measure}.{'.'.join(map(str, each['loc']))}", f"{each['msg']}.")
                for each in error.errors()
            ]
    return scorers


def _value_of(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:  # neither a number nor the name of a scorer
        return text


def _output_problems(arguments: argparse.Namespace) -> list[Problem]:
    """Return a problem if the file of scores cannot be written, checked before hours of scoring."""
    if arguments.score is None:
        text = "has no effect without --score; tokens are written to data.cache_dir. Add --score, or remove it."
        return [] if arguments.output is None else [Problem("--output", text)]
    return output_file_problems(_file_of(arguments))


def _file_of(arguments: argparse.Namespace) -> Path:
    return Path((arguments.output or SCORES).expanduser().absolute())


def _of_tokens(config: Config) -> list[Problem]:
    names = [name for name, source in config.data.sources.items() if source.tokenised and source.role is None]
    text = "contains tokens, but scorers need text. Remove the source."
    return [Problem(f"data.sources.{name}", text) for name in names]


def _score(
    config: Config, scorers: Mapping[Measure, ScorerConfig], overrides: Sequence[str], arguments: argparse.Namespace
) -> int:
    file = _file_of(arguments)
    by_measure = {str(measure): scorer for measure, scorer in scorers.items()}
    columns = score_documents(config.data, by_measure, file, lambda text: print(text, file=sys.stderr, flush=True))
    facts = {name: _summary(columns, name) for name in dict.fromkeys(columns["source"])}
    if arguments.json:
        print(json.dumps({"file": str(file), "sources": facts}, indent=1))
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("source", "documents", "bytes", "quality", "diversity", "clusters"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for name, its in facts.items():
        cells = f"{its['documents']:,}", f"{its['bytes']:,}", f"{its['quality']:.3f}", f"{its['diversity']:.3f}"
        table.add_row(name, *cells, str(its["clusters"]))
    new_console().print(table)
    print(f"written {file}\nnext    {_command_to_train(config, overrides, arguments, file)}")
    return 0


def _command_to_train(config: Config, overrides: Sequence[str], arguments: argparse.Namespace, scores: Path) -> str:
    """Return the command that trains on the scored documents."""
    if config.data.name == "python":  # has the sources of the shipped mix
        return f"lightning-llm train data=samplemix data.mixture.scores={scores}"
    frozen = [] if arguments.config is None else ["--config", str(arguments.config)]
    file = str(scores) if re.fullmatch(r"[\w./-]+", str(scores)) else f"'{scores}'"  # as Hydra reads it
    mixture = f"data.mixture={{kind: samplemix, scores: {file}}}"
    return command("train", *config_dir_arguments(), *frozen, *overrides, mixture)


def _summary(columns: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the size of a source, its mean scores and its number of clusters."""
    own = np.array(columns["source"]) == name
    clusters = set(columns["cluster"][own].tolist()) - {-1}
    means: dict[str, float] = {measure: float(columns[measure][own].mean()) for measure in MEASURES}
    return {
        "documents": int(own.sum()),
        "bytes": int(columns["text_bytes"][own].sum()),
        **means,
        "clusters": len(clusters),
    }
