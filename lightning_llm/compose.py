"""Command-line words and YAML files -> one checked `Config`, or every problem at once. Imports no torch.

Hydra composes; pydantic checks what came out. An override is forced into the composition (`a.b=1` as `++a.b=1`), so a
typo on the command line, behind `+` or inside a file arrives at the same check and gets the same answer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from lightning_llm.errors import ConfigError, Problem, did_you_mean
from lightning_llm.recipes_catalog import register_recipes
from lightning_llm.schema import Config
from lightning_llm.schema.strict import parse_config
from lightning_llm.workspace import default_outputs

CONFIG_MODULE = "lightning_llm.conf"


def compose_config(overrides: Sequence[str], config_dir: Path | None = None) -> Config:
    """Return the checked config of one run.

    Args:
        overrides: Hydra overrides as typed (`precision=bf16`, `trainer.max_steps=10`, `~callbacks.sample`).
        config_dir: a folder of further config groups (`DIR/recipe/mine.yaml`), searched before the shipped ones.

    Raises:
        ConfigError: with every problem found: unknown groups' values, keys, types, unresolvable interpolations.
    """
    with _hydra(config_dir) as search:
        if any(_recipe_sweep(overrides, search)):
            raise ConfigError(Problem("recipe", "this recipe is a sweep of several runs. Add -m, or use make sweep."))
        return _compose_one(_parse(overrides), search)


def compose_sweep(overrides: Sequence[str], config_dir: Path | None = None) -> list[tuple[list[str], Config]]:
    """Return (what tells it from the others, config) of every job of a sweep, in the order they are to run.

    Jobs are the product of all `a=1,2`, those of the recipe's `hydra.sweeper.params` included, and then of each line of
    its `sweep.also`. What is typed takes the place of the recipe's choices for the same key, in both.

    Raises:
        ConfigError: with the problems of all jobs, each said once.
    """
    with _hydra(config_dir) as search:
        params, also = _recipe_sweep(overrides, search)
        typed = _parse(overrides)
        plain = [each for each in typed if not each.is_sweep_override()]
        groups = [_parse([*params, *overrides])]
        groups += [[*plain, *_typed_first(_parse(line.split()), typed)] for line in also]
        problems: dict[Problem, None] = {}
        jobs = []
        for words in (words for parsed in groups for words in product(*(_choices_of(each) for each in parsed))):
            try:
                chosen = [word for word in words if word not in overrides]
                jobs.append((chosen, _compose_one(_parse(words), search)))
            except ConfigError as error:
                problems.update(dict.fromkeys(error.problems))
        if problems:
            raise ConfigError(problems)
        return jobs


def load_config(file: Path, overrides: Sequence[str]) -> Config:
    """Return the config that a run wrote as `config.yaml`, with value overrides on top.

    Raises:
        ConfigError: the file is missing or is no such config, or an override does not fit.
    """
    try:
        tree = OmegaConf.create(yaml.safe_load(file.read_text(encoding="utf-8")) or {})
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            Problem("--config", f"{file} cannot be read as YAML: {error}. Give a run's config.yaml.")
        ) from error
    if not isinstance(tree, DictConfig):
        raise ConfigError(Problem("--config", f"{file} holds no mapping. Give a run's config.yaml."))
    groups = set(Config.model_fields)
    for each in _parse(overrides):
        key = each.key_or_group
        if key in groups and isinstance(tree.get(key), DictConfig):
            text = "a whole group cannot be exchanged in a resolved config. Override single keys, or compose anew."
            raise ConfigError(Problem(key, text))
        if each.is_delete():
            raise ConfigError(Problem(key, "~ deletes from a composition; with --config, override single keys."))
        OmegaConf.update(tree, key, each.value(), force_add=True)
    changed = {each.key_or_group for each in _parse(overrides)}
    if changed & {"run.root", "run.experiment", "run.name"} and "run.dir" not in changed:
        tree.run.dir = (
            "${run.root}/${run.experiment}/${run.name}"  # a file keeps it resolved, where it was made of these
        )
    return _checked(tree)


def typed_value(overrides: Sequence[str], key: str) -> str | None:
    """Return the one value that the overrides set `key` to, None where they do not, or to several."""
    found = [each for each in _parse(overrides) if each.key_or_group == key and not each.is_sweep_override()]
    return str(found[-1].value()) if found else None


@contextmanager
def _hydra(config_dir: Path | None) -> Iterator[list[str]]:
    """Open Hydra on the shipped configs; yield the overrides that put `config_dir` behind them."""
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(Problem("--config-dir", f"{config_dir} is no folder. Give a folder of config groups."))
    register_recipes()
    OmegaConf.register_new_resolver("outputs_root", default_outputs, replace=True)
    GlobalHydra.instance().clear()
    if config_dir:  # its files may be others than last time; what is shipped stays
        _options_behind.cache_clear()
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        yield [f"hydra.searchpath=[file://{config_dir.absolute()}]"] if config_dir else []


def _parse(overrides: Sequence[str]) -> list[Override]:
    parsed, problems = [], []
    for word in overrides:
        try:
            parsed.append(OverridesParser.create().parse_override(_quoted(word)))
        except HydraException as error:
            why = str(error).splitlines()[0]
            problems.append(Problem(word, f"this is no override ({why}). Write key=value, ~key, or group=name."))
    if problems:
        raise ConfigError(problems)
    return parsed


def _quoted(word: str) -> str:
    """Return `resume=a/step=4` as `resume='a/step=4'`: the grammar wants quotes around a value with an equals sign."""
    key, _, value = word.partition("=")
    return f"{key}='{value}'" if "=" in value and not set(value) & set("'\"[]{}()$,") else word


def _group_options(group: str, search: list[str]) -> list[str]:
    # Hydra copies all it knows for each question, which takes longer than composing; no group has a dot in its name
    return [] if "." in group else _options_behind(group, tuple(search))


@cache
def _options_behind(group: str, search: tuple[str, ...]) -> list[str]:
    """Return the names that `group=` takes, recipes in subfolders as "sub/name"; empty where there is no such group."""
    loader = GlobalHydra.instance().config_loader()
    options = list(loader.get_group_options(group, overrides=list(search)))
    for child in loader.list_groups(group):
        names = loader.get_group_options(f"{group}/{child}", overrides=list(search))
        options += [f"{child}/{name}" for name in names]
    return options


def _unknown_option(parsed: Override, search: list[str]) -> Problem | None:
    options = _group_options(parsed.key_or_group, search)
    if parsed.is_delete() or parsed.is_sweep_override() or not options:
        return None
    value = parsed.value()
    if value is None or value in options or isinstance(value, list):
        return None
    return Problem(parsed.key_or_group, f"there is no '{value}'.{did_you_mean(str(value), options)}")


def _forced(parsed: Override, search: list[str]) -> str:
    """Return the override so that Hydra takes it even for an unknown key, which the strict check then names."""
    word = parsed.input_line or ""
    if parsed.is_delete() or _group_options(parsed.key_or_group, search) or parsed.key_or_group.startswith("hydra"):
        return word
    return "++" + word.lstrip("+")


def _choices_of(parsed: Override) -> list[str]:
    if not parsed.is_sweep_override():
        return [parsed.input_line or ""]
    if not parsed.is_discrete_sweep():
        raise ConfigError(
            Problem(parsed.key_or_group, "an interval cannot be enumerated. Write the values: a=1,2 or range(1,9).")
        )
    return [f"{parsed.get_key_element()}={value}" for value in parsed.sweep_string_iterator()]


def _recipe_sweep(overrides: Sequence[str], search: list[str]) -> tuple[list[str], list[str]]:
    """Return the chosen recipe's `hydra.sweeper.params`, less those typed on the command line, and its `sweep.also`."""
    if not any(each.key_or_group == "recipe" for each in _parse(overrides)):
        return [], []
    typed = {each.key_or_group for each in _parse(overrides)}
    plain = [each.input_line or "" for each in _parse(overrides) if not each.is_sweep_override()]
    try:
        words = [_forced(each, search) for each in _parse(plain)]
        tree = hydra_compose("config", overrides=[*search, *words], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException):
        return [], []  # the same composition follows for each job, and says there what is wrong
    params = tree.hydra.sweeper.get("params") or {}
    return [f"{key}={value}" for key, value in params.items() if key not in typed], list(_also(tree))


def _also(tree: DictConfig) -> Sequence[str]:
    """Return `sweep.also`: overrides of further jobs, one line of words each. Raises ConfigError if it is not that."""
    lines = OmegaConf.select(tree, "sweep.also") or []
    unknown = set(tree.get("sweep") or {}) - {"also"}
    if unknown or not isinstance(lines, list | ListConfig) or not all(isinstance(line, str) for line in lines):
        raise ConfigError(Problem("sweep", "takes `also` alone: a list of lines like 'precision=bf16 seed=0,1'."))
    return lines


def _typed_first(line: list[Override], typed: list[Override]) -> list[Override]:
    """Return `line` with typed choices in place of its own for the same key; what it sets to one value stays."""
    choices = {each.key_or_group: each for each in typed}
    return [choices.get(each.key_or_group, each) if each.is_sweep_override() else each for each in line]


def _compose_one(parsed: Sequence[Override], search: list[str]) -> Config:
    problems = [problem for each in parsed if (problem := _unknown_option(each, search))]
    words = [_forced(each, search) for each in parsed if not _unknown_option(each, search)]
    try:
        tree = hydra_compose("config", overrides=[*search, *words], return_hydra_config=True)
        with open_dict(tree):
            tree.recipe = tree.hydra.runtime.choices.get("recipe")
            del tree["hydra"]
            tree.pop("sweep", None)  # read by compose_sweep
        config = _checked(tree)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([*problems, Problem("composition", " ".join(str(error).split()))]) from error
    if problems:
        raise ConfigError(problems)
    return config


def _checked(tree: DictConfig) -> Config:
    problems = list(_unnamed(tree))
    problems += [Problem(key, "a value must be given.") for key in sorted(OmegaConf.missing_keys(tree))]
    if OmegaConf.select(tree, "run.root", throw_on_missing=False) is not None:
        OmegaConf.update(tree, "run.root", str(Path(tree.run.root).expanduser().absolute()))
    problems += _unresolvable(tree, "")
    if problems:
        raise ConfigError(problems)
    values: Any = OmegaConf.to_container(tree, resolve=True)
    if isinstance(values.get("run"), dict) and isinstance(values["run"].get("dir"), str):
        values["run"]["dir"] = str(Path(values["run"]["dir"]).expanduser().absolute())
    return parse_config(values)


def _unnamed(tree: DictConfig) -> Iterator[Problem]:
    """Yield each group whose file gives no `name`, and give it one, since others are made of it."""
    for group, field in Config.model_fields.items():
        needed = getattr(field.annotation, "model_fields", {}).get("name")
        if needed is not None and needed.is_required() and isinstance(tree.get(group), DictConfig):
            if "name" in tree[group]:
                continue
            yield Problem(f"{group}.name", f"a value must be given: what {group}=NAME calls this file.")
            OmegaConf.update(tree, f"{group}.name", "unnamed", force_add=True)


def _unresolvable(tree: DictConfig, prefix: str) -> list[Problem]:
    problems = []
    for key in tree:
        if OmegaConf.is_missing(tree, key):
            continue
        try:
            value = tree[key]
        except InterpolationToMissingValueError:
            continue  # the missing key itself is said already
        except OmegaConfBaseException as error:
            problems.append(Problem(f"{prefix}{key!s}", str(error).splitlines()[0]))
            continue
        if isinstance(value, DictConfig):
            problems += _unresolvable(value, f"{prefix}{key!s}.")
    return problems
