"""Command-line words and YAML files -> one checked `Config`, or every problem at once. Imports no torch.

Hydra composes; pydantic checks what came out. An override is forced into the composition (`a.b=1` as `++a.b=1`), so a
typo on the command line, behind `+` or inside a file arrives at the same check and gets the same answer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from lightning_llm.composition import Composer
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.overrides import choices_of, forced, forget_options, parse_overrides, unknown_option
from lightning_llm.recipes_catalog import register_recipes
from lightning_llm.redact import redact_uri, withheld
from lightning_llm.schema import Config
from lightning_llm.schema.strict import parse_config
from lightning_llm.waiting import Waiting
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
            raise ConfigError(
                Problem("recipe", "this recipe is a sweep of several runs. Add -m: train -m runs it, plan -m lists it.")
            )
        parsed = parse_overrides(overrides)
        if several := [each.key_or_group for each in parsed if each.is_sweep_override()]:
            text = "has several values, which makes a sweep of several runs. Add -m, or give one."
            raise ConfigError([Problem(key, text) for key in several])
        return _compose_one(parsed, Composer(search))


def compose_sweep(overrides: Sequence[str], config_dir: Path | None = None) -> list[tuple[list[str], Config]]:
    """Return (what tells it from the others, config) of every job of a sweep, in the order they are to run.

    Jobs are the product of all `a=1,2`, those of the recipe's `hydra.sweeper.params` included, and then of each line of
    its `sweep.also`. What is typed takes the place of the recipe's choices for the same key, in both.

    Raises:
        ConfigError: with the problems of all jobs, each said once.
    """
    with _hydra(config_dir) as search:
        params, also = _recipe_sweep(overrides, search)
        typed = parse_overrides(overrides)
        plain = [each for each in typed if not each.is_sweep_override()]
        groups = [parse_overrides([*params, *overrides])]
        groups += [[*plain, *_typed_first(parse_overrides(line.split()), typed)] for line in also]
        problems: dict[Problem, None] = {}
        jobs: list[tuple[list[str], Config]] = []
        composer, waiting = Composer(search), Waiting("composing the sweep's jobs")
        for words in (words for parsed in groups for words in product(*(choices_of(each) for each in parsed))):
            waiting.tell(len(jobs))
            try:
                chosen = [redact_uri(word) for word in words if word not in overrides]
                jobs.append((chosen, _compose_one(parse_overrides(words), composer)))
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
    for each in parse_overrides(overrides):
        key = each.key_or_group
        if key in groups and isinstance(tree.get(key), DictConfig):
            text = "a whole group cannot be exchanged in a resolved config. Override single keys, or compose anew."
            raise ConfigError(Problem(key, text))
        if each.is_delete():
            raise ConfigError(Problem(key, "~ deletes from a composition; with --config, override single keys."))
        OmegaConf.update(tree, key, each.value(), force_add=True)
    changed = {each.key_or_group for each in parse_overrides(overrides)}
    if changed & {"run.root", "run.experiment", "run.name"} and "run.dir" not in changed:
        tree.run.dir = (
            "${run.root}/${run.experiment}/${run.name}"  # a file keeps it resolved, where it was made of these
        )
    if "trainer.compile" in changed and "parallel.compile" not in changed:
        tree.parallel.compile = tree.trainer.compile  # resolved, too
    return _checked(tree)


def typed_value(overrides: Sequence[str], key: str) -> str | None:
    """Return the one value that the overrides set `key` to, None where they do not, or to several."""
    found = [each for each in parse_overrides(overrides) if each.key_or_group == key and not each.is_sweep_override()]
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
        forget_options()
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        yield [f"hydra.searchpath=[file://{config_dir.absolute()}]"] if config_dir else []


def _recipe_sweep(overrides: Sequence[str], search: list[str]) -> tuple[list[str], list[str]]:
    """Return the chosen recipe's `hydra.sweeper.params`, less those typed on the command line, and its `sweep.also`."""
    if not any(each.key_or_group == "recipe" for each in parse_overrides(overrides)):
        return [], []
    typed = {each.key_or_group for each in parse_overrides(overrides)}
    plain = [each.input_line or "" for each in parse_overrides(overrides) if not each.is_sweep_override()]
    try:
        words = [forced(each, search) for each in parse_overrides(plain)]
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


def _compose_one(parsed: Sequence[Override], composer: Composer) -> Config:
    unknown = [unknown_option(each, composer.search) for each in parsed]
    problems = [problem for problem in unknown if problem]
    try:
        tree = composer.tree([each for each, problem in zip(parsed, unknown, strict=True) if problem is None])
        with open_dict(tree):
            tree.pop("sweep", None)  # read by compose_sweep
            _leave_out_observers(tree, parsed)
        config = _checked(tree)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([*problems, Problem("composition", " ".join(str(error).split()))]) from error
    if problems:
        raise ConfigError(problems)
    return config


def _leave_out_observers(tree: DictConfig, parsed: Sequence[Override]) -> None:
    """Drop what a recipe's file sets of a default observer where the chosen callbacks have none (callbacks=none).

    What was typed stays, for the check to refuse: it would not be done. So do arguments of observers that have to be
    chosen (profile), which a file that sets them forgot to do.
    """
    typed = {".".join(each.key_or_group.split(".")[:2]) for each in parsed}
    for name in list(tree.get("callbacks") or {}):
        node = tree.callbacks[name]
        without_class = isinstance(node, DictConfig) and "_target_" not in node
        if without_class and name in _default_observers() and f"callbacks.{name}" not in typed:
            del tree.callbacks[name]


@cache
def _default_observers() -> frozenset[str]:
    file = files(CONFIG_MODULE) / "callbacks" / "default.yaml"
    return frozenset(yaml.safe_load(file.read_text(encoding="utf-8")))


def _checked(tree: DictConfig) -> Config:
    problems = list(_unnamed(tree))
    if OmegaConf.select(tree, "run.root", throw_on_missing=False) is not None:
        OmegaConf.update(tree, "run.root", str(Path(tree.run.root).expanduser().absolute()))
    try:
        values: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException:  # the first of them: all are looked for
        missing = [Problem(key, "a value must be given.") for key in sorted(OmegaConf.missing_keys(tree))]
        problems += [*missing, *_unresolvable(tree, "")]
        if not problems:
            raise
    if problems:
        raise ConfigError(problems)
    if isinstance(values.get("run"), dict) and isinstance(values["run"].get("dir"), str):
        values["run"]["dir"] = str(Path(values["run"]["dir"]).expanduser().absolute())
    if isinstance(values.get("logger"), dict) and isinstance(values["logger"].get("tracking_uri"), str):
        values["logger"]["tracking_uri"] = withheld(values["logger"]["tracking_uri"])
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
