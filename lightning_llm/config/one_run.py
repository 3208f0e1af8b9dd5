"""Words -> what Hydra composes of one run, read: its config, or every problem at once. Hydra is opened here alone."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.branching import GroupTree, branch_tree, read_branching
from lightning_llm.config.composed_tree import CONFIG_MODULE, compose_tree_of, not_composed
from lightning_llm.config.composition import COMPOSITION_ERRORS, Composer, shipped_composer
from lightning_llm.config.derived_keys import fill_steps
from lightning_llm.config.file_sources import register_sources
from lightning_llm.config.overrides import forget_options, parse_overrides, unknown_option
from lightning_llm.config.recipes import folder_problems
from lightning_llm.config.resolve import read_tree
from lightning_llm.config.schema.strict import Reading
from lightning_llm.config.sources import search_override
from lightning_llm.config.weight_folders import fill_from_weights, with_shape_of_weights
from lightning_llm.config.workspace import default_outputs


@contextmanager
def open_composer(config_dir: Path | None) -> Iterator[Composer]:
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


def compose_one(parsed: Sequence[Override], composer: Composer, known: Sequence[Problem]) -> Reading:
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
