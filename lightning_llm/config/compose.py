"""Command-line arguments and YAML files -> one checked `Config`, or every problem at once. Imports no torch.

Hydra composes; pydantic checks what came out. An override is forced into the composition (`a.b=1` as `++a.b=1`), so a
typo on the command line, behind `+` or inside a file arrives at the same check and gets the same answer.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path

from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from lightning_llm.config.branching import GroupTree, apply_overrides, branch_tree, read_branching
from lightning_llm.config.cluster_choice import give_way_to_cluster
from lightning_llm.config.composed_tree import CONFIG_MODULE, compose_tree_of, not_composed
from lightning_llm.config.composition import COMPOSITION_ERRORS, Composer, shipped_composer
from lightning_llm.config.epochs import fill_steps
from lightning_llm.config.file_sources import register_sources
from lightning_llm.config.from_weights import fill_from_weights, with_shape_of_weights
from lightning_llm.config.overrides import choices_of, forget_options, parse_overrides, read_overrides, unknown_option
from lightning_llm.config.recipes import folder_problems
from lightning_llm.config.redact import redact_uri
from lightning_llm.config.resolve import read_tree
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.migrations import migrate
from lightning_llm.config.schema.strict import Reading
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.config.sweep_keys import choices_of_products, of_search, sweep_config, sweep_keys, with_seeds
from lightning_llm.config.workspace import default_outputs
from lightning_llm.config.yaml_file import read_mapping
from lightning_llm.config.yaml_source import search_override
from lightning_llm.errors import ConfigError, Problem
from lightning_llm.terminal.waiting import Waiting


def compose_config(overrides: Sequence[str], config_dir: Path | None = None) -> Config:
    """Return the checked config of one run.

    Args:
        overrides: Hydra overrides as typed (`precision=bf16`, `trainer.max_steps=10`, `~callbacks.sample`).
        config_dir: a folder of further config groups (`DIR/recipe/mine.yaml`), searched behind the shipped ones.

    Raises:
        ConfigError: with every problem found: unknown groups' values, keys, types, unresolvable interpolations.
    """
    return read_composed(overrides, config_dir).checked()


def read_composed(overrides: Sequence[str], config_dir: Path | None = None) -> Reading:
    """Return what `compose_config` does, with the sound part beside the problems for the rules to go on with.

    Raises:
        ConfigError: where nothing is left to go on with.
    """
    with _hydra(config_dir) as composer:
        parsed, problems = read_overrides(overrides)
        if any(_recipe_sweep(parsed, composer)):
            text = "this recipe is a sweep of several runs. Add -m: train -m runs it, plan -m lists it."
            raise ConfigError([*problems, Problem("recipe", text)])
        if of_sweeps := [each.key_or_group for each in parsed if each.key_or_group.startswith("sweep.")]:
            text = "is of a sweep, and nothing in one run reads it. Add -m, or leave it out."
            raise ConfigError([*problems, *(Problem(key, text) for key in of_sweeps)])
        if several := [each.key_or_group for each in parsed if each.is_sweep_override()]:
            text = "has several values, which makes a sweep. Add -m, or give one (text with a comma: in quotes)."
            raise ConfigError([*problems, *(Problem(key, text) for key in several)])
        return _compose_one(parsed, composer, problems)


def compose_tree(overrides: Sequence[str], config_dir: Path | None = None) -> tuple[DictConfig, dict[str, str]]:
    """Return what the overrides compose to, nothing resolved or checked, and the file chosen for each group.

    Raises:
        ConfigError: they do not compose.
    """
    with _hydra(config_dir) as composer:
        parsed = parse_overrides(overrides)
        if problems := [problem for each in parsed if (problem := unknown_option(each, composer.search))]:
            raise ConfigError(problems)
        try:
            return compose_tree_of(with_shape_of_weights(parsed), composer)
        except COMPOSITION_ERRORS as error:
            raise not_composed(error) from error


def compose_sweep(overrides: Sequence[str], config_dir: Path | None = None) -> list[tuple[list[str], Config]]:
    """Return (what tells it from the others, config) of every job of a sweep, in the order they are to run.

    Jobs are the product of all `a=1,2`, those of the recipe's `hydra.sweeper.params` included, and then of each line of
    its `sweep.also`. What is typed takes the place of the recipe's choices for the same key, in both.

    Raises:
        ConfigError: with the problems of all jobs, each reported once.
    """
    read = read_sweep(overrides, config_dir)
    if problems := dict.fromkeys(problem for _, reading in read for problem in reading.problems):
        raise ConfigError(problems)
    return [(arguments, reading.checked()) for arguments, reading in read]


def read_sweep(overrides: Sequence[str], config_dir: Path | None = None) -> list[tuple[list[str], Reading]]:
    """Return what `compose_sweep` does, with the sound part of each job beside its problems.

    Raises:
        ConfigError: where nothing is left to go on with, or they are too many.
    """
    with _hydra(config_dir) as composer:
        typed, problems = read_overrides(overrides)
        groups = of_search(with_seeds(_groups(typed, composer), typed, keys := sweep_keys(typed, composer)), keys)
        jobs: list[tuple[list[str], Reading]] = []
        waiting = Waiting("composing the sweep's jobs")
        choices = (product(*each) for each in choices_of_products(groups, composer.search))
        for arguments in (arguments for product_of_one in choices for arguments in product_of_one):
            waiting.tell(len(jobs))
            chosen = [redact_uri(word) for word in arguments if word not in overrides]
            jobs.append((chosen, _compose_one(parse_overrides(arguments), composer, problems)))
        return jobs


def read_sweep_keys(overrides: Sequence[str], config_dir: Path | None = None) -> SweepConfig:
    """Return the keys below `sweep`, of the recipe or typed. Raises ConfigError with all that is wrong with them."""
    with _hydra(config_dir) as composer:
        return sweep_keys(parse_overrides(overrides), composer)


def read_space(overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, Override]:
    """Return the choices of a search by key, typed or of the recipe: what a sweep would take the product of.

    Raises:
        ConfigError: arguments that are no overrides.
    """
    with _hydra(config_dir) as composer:
        typed = parse_overrides(overrides)
        params, _ = _recipe_sweep(typed, composer)
        return {each.key_or_group: each for each in [*parse_overrides(params), *typed] if each.is_sweep_override()}


def load_config(file: Path, overrides: Sequence[str]) -> Config:
    """Return the config that a run wrote as `config.yaml`, with value overrides on top, to know what the run was.

    Its callbacks' classes are not looked for: they may lie in a `--config-dir` that is not open here.

    Raises:
        ConfigError: the file is missing or is no such config, or an override does not fit.
    """
    tree = read_mapping(file, file.name, "It must be as its run wrote it.")
    migrate(tree)
    return _read_resolved(tree, overrides, to_build=False).checked()


def read_file(file: Path, overrides: Sequence[str], config_dir: Path | None = None) -> Reading:
    """Return the config that `--config FILE` is, with overrides on top; what is sound beside its problems.

    `group=name` exchanges the whole group for that file's values; overrides of single keys come after.

    Raises:
        ConfigError: where nothing is left to go on with.
    """
    tree = read_mapping(file, "--config", "Give a run's config.yaml.")
    migrate(tree)
    return _read_resolved(tree, overrides, config_dir, to_build=True)


def _read_resolved(
    tree: DictConfig, overrides: Sequence[str], config_dir: Path | None = None, *, to_build: bool
) -> Reading:
    parsed, problems = read_overrides(overrides)
    for each in parsed:
        if each.key_or_group == "recipe":
            text = "is what the file was composed of. Override groups and keys, or compose anew without --config."
            problems.append(Problem("recipe", text))
    problems += apply_overrides(
        tree,
        [each for each in parsed if each.key_or_group != "recipe"],
        lambda word, group: compose_tree([word], config_dir)[0][group],
    )
    if problems:
        raise ConfigError(problems)
    changed = {each.key_or_group for each in parsed}
    if changed & {"run.root", "run.experiment", "run.name"} and "run.dir" not in changed:
        OmegaConf.update(tree, "run.dir", "${run.root}/${run.experiment}/${run.name}")  # kept resolved, made of these
    give_way_to_cluster(tree, changed)
    fill_from_weights(tree, list(changed))
    if to_build:
        fill_steps(tree, changed, of_file=True)
    return read_tree(tree, to_build=to_build)


def typed_value(overrides: Sequence[str], key: str) -> str | None:
    """Return the one value that the overrides set `key` to, None where they do not, or to several."""
    found = [each for each in parse_overrides(overrides) if each.key_or_group == key and not each.is_sweep_override()]
    return str(found[-1].value()) if found else None


@contextmanager
def _hydra(config_dir: Path | None) -> Iterator[Composer]:
    """Open Hydra on the shipped configs, with `config_dir` behind them; yield what composes there."""
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(Problem("--config-dir", f"{config_dir} is no folder. Give a folder of config groups."))
    if config_dir is not None and (problems := folder_problems(config_dir)):
        raise ConfigError(problems)
    register_sources()
    OmegaConf.register_new_resolver("outputs_root", default_outputs, replace=True)
    GlobalHydra.instance().clear()
    if config_dir:  # its files may be others than last time; what is shipped stays
        forget_options()
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        yield Composer([search_override(config_dir)], config_dir) if config_dir else shipped_composer()


def _recipe_sweep(typed: Sequence[Override], composer: Composer) -> tuple[list[str], list[str]]:
    """Return the chosen recipe's `hydra.sweeper.params`, less those typed on the command line, and its `sweep.also`.

    Raises:
        ConfigError: several recipes are chosen, and one of them is a sweep.
    """
    chosen = [each for each in typed if each.key_or_group == "recipe"]
    if not chosen:
        return [], []
    for word in choices_of(chosen[-1], composer.search) if chosen[-1].is_sweep_override() else []:
        if any(_recipe_sweep(parse_overrides([word]), composer)):
            text = (
                f"has several values, and {word} is a sweep itself, whose choices would be left out. Give that alone."
            )
            raise ConfigError(Problem("recipe", text))
    try:
        composed = composer.compose([each for each in typed if not each.is_sweep_override()])
    except COMPOSITION_ERRORS:
        return [], []  # the same composition follows for each job, and says there what is wrong
    keys = {each.key_or_group for each in typed}
    params = [f"{key}={value}" for key, value in composed.sweep_params.items() if key not in keys]
    return params, list(sweep_config(composed.tree).also)


def _groups(typed: Sequence[Override], composer: Composer) -> list[list[Override]]:
    """Return the overrides of each product that a sweep is made of: the first, and one per line of `sweep.also`.

    Lines that are typed are as they are; of those of a recipe what else is typed takes the place of their choices.
    """
    params, also = _recipe_sweep(typed, composer)
    plain = [each for each in typed if not each.is_sweep_override()]
    over = [] if any(each.key_or_group == "sweep.also" for each in typed) else typed
    lines = [[*plain, *_typed_first(parse_overrides(line.split()), over)] for line in also]
    return [[*parse_overrides(params), *typed], *lines]


def _typed_first(line: list[Override], typed: Sequence[Override]) -> list[Override]:
    """Return `line` with typed choices in place of its own for the same key; what it sets to one value stays."""
    choices = {each.key_or_group: each for each in typed}
    return [choices.get(each.key_or_group, each) if each.is_sweep_override() else each for each in line]


def _compose_one(parsed: Sequence[Override], composer: Composer, known: Sequence[Problem]) -> Reading:
    """Return what Hydra composes, read; `known` are problems of arguments that are not among `parsed`."""
    try:
        branching = read_branching(parsed, composer.config_dir)
    except ConfigError as error:
        raise ConfigError([*known, *error.problems]) from error
    if branching is None:
        parsed = with_shape_of_weights(parsed)
    unknown = {each.key_or_group: problem for each in parsed if (problem := unknown_option(each, composer.search))}
    problems = [*known, *unknown.values()]
    sound_overrides = [each for each in parsed if each.key_or_group not in unknown]
    typed = {each.key_or_group for each in parsed}
    try:
        if branching is not None:
            tree = branch_tree(branching, sound_overrides, compose_tree_of([], composer)[0], _group_of(composer))
            fill_steps(tree, typed, of_file=True)
            return _reading(read_tree(tree, stand_ins=unknown), known, problems, unknown)
        tree, _ = compose_tree_of(sound_overrides, composer)
        try:
            fill_from_weights(tree, [each.key_or_group for each in parsed])
        except ConfigError as error:
            problems += error.problems
            tree, unknown["model"] = _with_usual_model(sound_overrides, composer), error.problems[0]
        try:
            fill_steps(tree, typed)
        except ConfigError as error:
            problems += error.problems
        return _reading(read_tree(tree, stand_ins=unknown), known, problems, unknown)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    except COMPOSITION_ERRORS as error:
        raise ConfigError([*problems, *not_composed(error).problems]) from error


def _with_usual_model(parsed: Sequence[Override], composer: Composer) -> DictConfig:
    """Return the tree of the overrides with the model that nobody chose, whose keys others are made of.

    It stands in for one without weights, typed or of the recipe, so that nothing else is found wrong for it.
    """
    usual = compose_tree_of([], composer)[1]["model"]
    others = [each for each in parsed if each.key_or_group.partition(".")[0] != "model"]
    return compose_tree_of([*others, *parse_overrides([f"model={usual}"])], composer)[0]


def _reading(reading: Reading, known: Sequence[Problem], problems: list[Problem], unknown: Iterable[str]) -> Reading:
    """Return `reading` with the problems of the arguments, the sound part only where the rest is what was meant."""
    # Without the recipe, or with a word less, the rest is not what was meant: rules would speak of another run.
    sound = None if known or "recipe" in unknown else reading.config
    return Reading(sound, (*problems, *reading.problems))


def _group_of(composer: Composer) -> GroupTree:
    """Return what composes a group's file for a tree that is there already."""
    return lambda word, group: compose_tree_of(parse_overrides([word]), composer)[0][group]
