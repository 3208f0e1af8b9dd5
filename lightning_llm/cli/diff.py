"""The verb `diff`: differences of two runs. Imports no torch."""

import argparse
import json
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem, gathered
from lightning_llm.compare.format import as_json
from lightning_llm.compare.runs.differences import all_differences
from lightning_llm.compare.runs.find import RunSelection, find_runs
from lightning_llm.compare.runs.read_runs import read_all
from lightning_llm.config.config_hash import NOT_IDENTITY, below


def diff(arguments: argparse.Namespace) -> int:
    """Print the differences of two runs in resolved config, versions, device, code and data; return 0."""
    found: list[RunSelection] = []
    problems: list[Problem] = []
    for word in (arguments.run, arguments.other):
        with gathered(problems):
            found.append(find_runs([word]))
            problems += found[-1].problems
    if len(found) < 2:
        raise ConfigError(problems)
    for word, each in zip((arguments.run, arguments.other), found, strict=True):
        if len(each.folders) > 1:
            text = f"contains {len(each.folders)} runs, must be one. Give one of them, e.g. {each.folders[0]}."
            problems.append(Problem(word, text))
    runs, broken = read_all([folder for each in found for folder in each.folders[:1]])
    if problems or broken:
        raise ConfigError([*problems, *broken])
    differing = all_differences(*(runs if len(runs) == 2 else [runs[0], runs[0]]))
    differing = {key: values for key, values in differing.items() if arguments.all or not below(key, NOT_IDENTITY)}
    if arguments.json:
        print(as_json({key: list(values) for key, values in differing.items()}))
        return 0
    if not differing:
        print("no difference in configs, versions, device, code and data")
        return 0
    width = max(map(len, differing))
    print(f"{'':<{width}}  {runs[0].name} | {runs[-1].name}")
    for key, (ours, theirs) in differing.items():
        print(f"{key:<{width}}  {_word(ours)} | {_word(theirs)}")
    return 0


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
