"""The verb `config`: the resolved config, its differences from the defaults, or the values of a group."""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.config.compose import compose_config, compose_tree
from lightning_llm.config.config_hash import flatten
from lightning_llm.config.recipes import describe, group_names, option_files
from lightning_llm.config.redact import redact_uri
from lightning_llm.config.run_paths import secret_problems
from lightning_llm.config.schema import Config
from lightning_llm.config.sources import kinds_without_file
from lightning_llm.config.yaml_file import config_text
from lightning_llm.plan.resolve import DerivedConfig
from lightning_llm.plan.step_law import law_notes, law_row
from lightning_llm.run.checked_plan import problems_beyond, read_arguments
from lightning_llm.run.resume.branch import with_branch_resolved

MISSING = "(none)"
"""Placeholder for a missing value."""
BARE = re.compile(r"[A-Za-z_/][\w./-]*")
NOT_TEXT = {"null", "true", "false", "nan", "inf"}


def config(arguments: argparse.Namespace) -> int:
    """Print the composed config, its differences (--diff) or the values of groups (--group); return 0.

    Raises:
        ConfigError: the overrides or the file are invalid. If each key is valid and only their combination is not, the
            config is printed first.
    """
    if arguments.group is not None:
        return _print_groups(arguments)
    if arguments.multirun:
        return _print_sweep(arguments)
    found = with_branch_resolved(read_arguments(arguments)).checked()
    if secrets := list(secret_problems(found)):  # before anything is printed
        raise ConfigError(secrets)
    if arguments.diff:
        _print_difference(arguments, found)
    else:
        law = found.step_law
        if law and not arguments.json:
            print(f"# {' '.join(law_row(law.as_data()))}")
        text = json.dumps(found.model_dump(mode="json"), indent=1) if arguments.json else config_text(found).rstrip()
        print(text, flush=True)
    for line in law_notes(found.step_law):
        print(line, file=sys.stderr)
    if problems := problems_beyond(DerivedConfig(found)):
        raise ConfigError(problems)
    return 0


def _print_sweep(arguments: argparse.Namespace) -> int:
    """Print the first job's config and each other job's differences from it; return 0."""
    if arguments.diff:
        raise ConfigError(Problem("--diff", "cannot be used with -m. Remove -m and give the overrides of one job."))
    from lightning_llm.sweep.jobs import checked_jobs  # slow, and not needed for one run's config

    jobs, _, _ = checked_jobs(arguments, to_train=False)
    configs = [found.model_dump(mode="json") for _, found in jobs]
    if arguments.json:
        facts = [{"overrides": overrides, "config": data} for (overrides, _), data in zip(jobs, configs, strict=True)]
        print(json.dumps({"jobs": facts}, indent=1))
        return 0
    print(f"# job 0 of {len(jobs)}: {' '.join(jobs[0][0])}")
    print(config_text(jobs[0][1]).rstrip(), flush=True)
    first = flatten(configs[0])
    for number, ((overrides, _), data) in enumerate(zip(jobs[1:], configs[1:], strict=True), 1):
        print(f"# job {number} of {len(jobs)}: {' '.join(overrides)}")
        for line in _differing(first, flatten(data)):
            print(f"#   {line}")
    return 0


def _differing(first: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Yield the overrides that turn `first` into `other`. A group with another file is listed by its name only."""
    differ = [key for key in {**first, **other} if first.get(key, MISSING) != other.get(key, MISSING)]
    groups = [key.removesuffix("name") for key in differ if key.endswith(".name") and key.count(".") == 1]
    for key in differ:
        group = key.partition(".")[0] + "."
        if group == "run." or (group in groups and key != f"{group}name"):
            continue
        yield f"{key}={override_value(other[key])}" if key in other else f"~{key}"


def _print_difference(arguments: argparse.Namespace, found: Config) -> None:
    if arguments.config or found.branch_from:
        _, defaults = _plain_tree([], arguments)
        choices = _choices_in(found, arguments.config_dir)
        values = found.model_dump(mode="json")
        changes = difference(
            values, choices, defaults, lambda overrides: _resolved_tree(overrides, arguments.config_dir)
        )
    else:
        tree, choices = _plain_tree(arguments.overrides, arguments)
        _, defaults = _plain_tree([], arguments)
        changes = difference(tree, choices, defaults, lambda overrides: _plain_tree(overrides, arguments)[0])
    if arguments.json:
        print(json.dumps({each.key: {"value": each.value, "default": each.default} for each in changes}, indent=1))
        return
    if found.recipe and not arguments.config:
        print(f"# recipe={found.recipe} and your overrides are equal to these overrides of the defaults:")
    for each in changes:
        shown = "" if each.default is MISSING else f"  # {override_value(each.default)}"
        print(f"{shlex.quote(each.word)}{shown}", flush=True)


@dataclass(frozen=True)
class Difference:
    """One difference from the defaults: the override `word` that causes it, its value and the default's.

    The default is `MISSING` if there is none."""

    key: str
    word: str
    value: Any
    default: Any


def difference(
    tree: Mapping[str, Any],
    choices: Mapping[str, str],
    defaults: Mapping[str, str],
    compose: Callable[[list[str]], Mapping[str, Any]],
) -> list[Difference]:
    """Return the overrides that turn the defaults into `tree`.

    Args:
        tree: values by group and key. If it is unresolved, values that follow from another key
            (`${model.vocab_size}`) are not listed.
        choices: files of the groups in `tree`; a group with another file is listed by name, not key by key.
        defaults: default file of each group.
        compose: returns the tree of given group overrides, in the form of `tree`.
    """
    chosen = [
        Difference(group, f"{group}={name}", name, defaults.get(group, MISSING))
        for group, name in choices.items()
        if name != defaults.get(group)
    ]
    base = compose([each.word for each in chosen])
    before, after = ({key: _shown(value) for key, value in flatten(each).items()} for each in (base, tree))
    named = {"recipe", *(f"{group}.name" for group in choices)}
    for key, value in after.items():
        if key not in named and before.get(key, MISSING) != value:
            chosen.append(Difference(key, f"{key}={override_value(value)}", value, before.get(key, MISSING)))
    return [*chosen, *(Difference(key, f"~{key}", None, value) for key, value in _deleted(base, tree, ""))]


def _deleted(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys of `before` missing in `after`, each with its value; keys below a missing key are left out."""
    for key, value in before.items():
        if key not in after:
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping) and isinstance(after[key], Mapping):
            yield from _deleted(value, after[key], f"{prefix}{key}.")


def _shown(value: Any) -> Any:
    return redact_uri(value) if isinstance(value, str) and "://" in value else value


def override_value(value: Any) -> str:
    """Return `value` (JSON data) in Hydra's override grammar, so that parsing it returns the same value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        bare = BARE.fullmatch(value) and value.lower() not in NOT_TEXT
        return value if bare else str(QuotedString(value, Quote.single).with_quotes())
    if isinstance(value, list):
        return f"[{','.join(map(override_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{override_value(each)}' for key, each in value.items())}}}"
    return repr(value)


def _plain_tree(overrides: list[str], arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, str]]:
    tree, choices = compose_tree(overrides, arguments.config_dir)
    values: Any = OmegaConf.to_container(tree, resolve=False)
    return values, {group: name for group, name in choices.items() if group in group_names() and group != "recipe"}


def _resolved_tree(overrides: list[str], config_dir: Path | None) -> dict[str, Any]:
    return compose_config(overrides, config_dir).model_dump(mode="json")


def _choices_in(config: Config, config_dir: Path | None) -> dict[str, str]:
    """Return the group files named in a resolved config that exist."""
    named = {group: getattr(getattr(config, group, None), "name", None) for group in group_names()}
    return {group: name for group, name in named.items() if name in option_files(group, config_dir)}


def _print_groups(arguments: argparse.Namespace) -> int:
    if arguments.config:
        raise ConfigError(
            Problem("--config", "cannot be used with --group: a run's config.yaml is already composed. Remove it.")
        )
    groups = group_names()
    if arguments.group and arguments.group not in groups:
        text = f"there is no group '{arguments.group}'.{did_you_mean(arguments.group, groups)}"
        raise ConfigError(Problem("--group", text))
    _, choices = compose_tree(arguments.overrides, arguments.config_dir)
    wanted = [arguments.group] if arguments.group else groups
    found = {
        group: {name: describe(file) for name, file in option_files(group, arguments.config_dir).items()}
        for group in wanted
    }
    kinds = {group: kinds_without_file(group, found[group]) for group in wanted}
    if arguments.json:
        facts = {
            group: {"chosen": choices.get(group), "values": found[group]}
            | ({"kinds_without_file": kinds[group]} if kinds[group] else {})
            for group in wanted
        }
        print(json.dumps(facts, indent=1))
        return 0
    width = max(len(name) for names in (*found.values(), *kinds.values()) for name in names)
    for group, names in found.items():
        if not arguments.group:
            print(f"{group}=")
        for name, text in names.items():
            print(f"{'*' if name == choices.get(group) else ' '} {name:<{width}}  {text}".rstrip())
        for name, text in kinds[group].items():
            print(f"  {name:<{width}}  {text} Has no file: set {group}.name={name}.")
    return 0
