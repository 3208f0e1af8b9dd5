"""Facts that a change of structure must not alter: hashes, plans, verdicts, keys of files, verbs and flags.

Each function returns lines of text, so that a difference reads like a diff. `record.py` writes them and
`test_frozen.py` compares them. Sentences are left out, because their wording may improve.
"""

import argparse
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

from lightning_llm.__main__ import main
from lightning_llm.cli.command_line import _parser
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_hash
from lightning_llm.config.schema import Config
from lightning_llm.config.sweep_space import compose_sweep
from lightning_llm.plan.report import plan_facts
from lightning_llm.plan.resolve import DerivedConfig

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FIXED = ["run.name=frozen", "run.root=/frozen", "data.cache_dir=/frozen"]
"""Keys with defaults that depend on the time or the machine."""
PATHS = {
    "data=huggingface": ["data.sources.huggingface.path=/PATH"],
    "data=jsonl": ["data.sources.jsonl.path=/PATH"],
    "data=megatron": ["data.sources.megatron.path=/PATH", "data.tokenizer.path=/PATH"],
    "data=olmo": ["data.sources.olmo.path=/PATH", "data.tokenizer.path=/PATH"],
    "data=parquet": ["data.sources.parquet.path=/PATH"],
    "data=python_jsonl": ["data.sources.jsonl.path=/PATH"],
    "data=replay": ["data.sources.new.path=/PATH", "data.sources.old.path=/PATH"],
    "data=samplemix": ["data.mixture.scores=/PATH"],
    "data=text": ["data.sources.text.path=/PATH"],
}
"""Values for mandatory keys, by override."""
NEED_RUNS = ("model=from_weights", "recipe=cpt/", "recipe=distil", "recipe=ablate/")
"""Need weights that exist; tests/train, tests/run and tests/sweep compose and run them."""
SWEEPS = (
    "precision_shootout",
    "ladder",
    "layouts",
    "gla",
    "aa_noise",
    "lr_by_precision",
    "mxfp4_ablation",
    "optimizers",
)
"""Sweeps with jobs that depend on no other run."""
MACHINE = ("disk", "run_dir", "reports", "runs", "looks")
"""Parts of a plan or a verdict that depend on the machine, on where files are or on the time."""


def config_lines() -> list[str]:
    """Return one line "override config_hash recipe_hash" per value of every group and per recipe."""
    groups = [f"{file.parent.name}={file.stem}" for file in sorted((ROOT / "conf").glob("*/*.yaml"))]
    return [_hash_line(each, composed(each)) for each in [*_own(groups), *recipes()]]


@cache
def composed(override: str) -> Config:
    """Return the config of one override of a group or of a recipe."""
    return compose_config([override, *PATHS.get(override, ()), *FIXED])


def sweep_lines(name: str) -> list[str]:
    """Return one line "override... config_hash recipe_hash" per job of a shipped sweep."""
    jobs = compose_sweep([f"recipe=sweep/{name}", *FIXED])
    return [_hash_line(" ".join(overrides), config) for overrides, config in jobs]


def recipes() -> list[str]:
    """Return the override of every shipped recipe that is one run and needs no other run's files."""
    files = sorted((ROOT / "recipes").rglob("*.yaml"))
    names = [file.relative_to(ROOT / "recipes").with_suffix("").as_posix() for file in files]
    return list(_own(f"recipe={name}" for name in names if not name.startswith("sweep/")))


def plan_lines(override: str) -> list[str]:
    """Return the numbers, flags and names of a recipe's plan, one line "key value" each."""
    facts = json.loads(json.dumps(plan_facts(DerivedConfig(composed(override)).plan())))
    if facts["hardware"]["name"] == "cpu":
        del facts["hardware"]  # this machine's memory
    return list(_facts(facts))


def verdict_lines(sweep: Path, output: Path) -> list[str]:
    """Return the numbers and names of compare.json over the runs in `sweep`, one line "key value" each."""
    with redirect_stdout(io.StringIO()):
        main(["compare", str(sweep), "--output", str(output)])
    return list(_facts(json.loads((output / "compare.json").read_text())))


def file_key_lines(run: Path) -> list[str]:
    """Return the keys of every kind of record that a run's folder holds, one line "file key" each."""
    (manifest,) = list((run / "checkpoints").glob("step=*/manifest.json"))[-1:]
    keys = {("summary.json", key) for key in _keys(json.loads((run / "summary.json").read_text()))}
    keys |= {("manifest.json", key) for key in _keys(json.loads(manifest.read_text()))}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        keys |= {("metrics.jsonl", key) for key in json.loads(line)}
    return [" ".join(each) for each in sorted(keys)]


def verb_lines() -> list[str]:
    """Return every verb and flag of the command line, one line "verb flag" each; help texts are left out."""
    return sorted(_flags(_parser()))


def _flags(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from _flags(child, f"{prefix}{name} ")
        else:
            choices = f" {','.join(map(str, action.choices))}" if action.choices else ""
            yield f"{prefix}{','.join(action.option_strings) or action.dest}{choices}"


def _own(overrides: Iterable[str]) -> Iterator[str]:
    return (each for each in overrides if not each.startswith(NEED_RUNS))


def _hash_line(override: str, config: Config) -> str:
    return f"{override} {config_hash(config)} {config.precision.recipe_hash}"


def _facts(value: Any, key: str = "") -> Iterator[str]:
    """Yield "key value" of every leaf, apart from sentences, lists of ranks and parts that depend on the machine."""
    if key.startswith(MACHINE) or key.endswith(".ranks"):
        return
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _facts(each, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _facts(each, f"{key}[{number}]")
    elif isinstance(value, float):
        yield f"{key} {value:.9g}"
    elif not isinstance(value, str) or " " not in value:
        yield f"{key} {value}"


def _keys(value: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted keys of nested mappings; entries of a list count as one."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _keys(each, f"{key}.{name}".lstrip("."))
    else:
        yield key
