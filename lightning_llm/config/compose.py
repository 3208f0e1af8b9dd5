"""Compose command-line overrides and YAML files into one checked `Config`, or report all problems. No torch.

Path of an override: `overrides` parses it, `sources` opens the files and checks group names, `Composer` merges,
`derived_keys` fills in derived keys, `resolve` resolves interpolations, and `schema` validates. Overrides are forced
into the composition (`a.b=1` as `++a.b=1`), so that typos on the command line, after `+` or in a file are all reported
by the same check.
"""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean, gathered
from lightning_llm.config.branching import branch_tree, read_branching
from lightning_llm.config.derived_keys import (
    FROM_WEIGHTS,
    fill_from_weights,
    fill_named_casts,
    fill_steps,
    give_way_to_cluster,
    leave_out_observers,
)
from lightning_llm.config.overrides import choices_of, parse_overrides, read_overrides
from lightning_llm.config.recipes import group_names
from lightning_llm.config.resolve import first_line, read_tree
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.sweep import SweepConfig, read_sweep_keys
from lightning_llm.config.schema.validation import ParsedConfig
from lightning_llm.config.sources import group_options, open_hydra, unknown_option
from lightning_llm.config.weight_folders import INIT_FROM

FORCED = "++"
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, RecursionError, ValueError)
"""Hydra's errors for files and arguments that do not compose; ValueError: bad keywords in a defaults list."""

KEPT = {
    "model": ("init_from",),
    "data": ("global_batch_size", "micro_batch_size", "sequence_length", "max_tokens", "epochs", "document_mask"),
    "precision": (),
    "parallel": (),
    "optim": (),
    "schedule": (),
    "spikes": (),
    "logger": (),
    "cluster": (),
}
"""{group: keys of a preset that stay if another file of that group is selected, which replaces all other keys}.

These keys belong to the run: batch, length, initial weights. Files of other groups (trainer, callbacks, launcher) do
not exclude each other, so all of a preset's keys for them stay."""


def compose_config(overrides: Sequence[str], config_dir: Path | None = None) -> Config:
    """Return the checked config of one run.

    Args:
        overrides: Hydra overrides (`precision=bf16`, `trainer.max_steps=10`, `~callbacks.sample`).
        config_dir: a folder of further config groups (`DIR/recipe/mine.yaml`), searched after the shipped ones.

    Raises:
        ConfigError: with all problems: unknown options, keys, types, unresolvable interpolations.
    """
    return read_composed(overrides, config_dir).checked()


def read_composed(overrides: Sequence[str], config_dir: Path | None = None) -> ParsedConfig:
    """Return the config of one run as `compose_config`, but with its problems instead of raising them.

    So further rules can run on the valid part, and report their problems together with these.

    Raises:
        ConfigError: no part is valid, or the overrides define a sweep.
    """
    parsed, problems = read_overrides(overrides)
    with open_composer(config_dir) as composer:
        if any(recipe_sweep(parsed, composer)):
            text = "this preset is a sweep of several runs. Add -m: train -m runs it, plan -m lists it, "
            raise ConfigError([*problems, Problem("recipe", f"{text}config -m prints it.")])
        keys = [each.key_or_group for each in parsed]
        if sweep_keys := [key for key in keys if key.startswith("sweep.")]:
            text = "is only read by a sweep. Add -m, or omit it."
            raise ConfigError([*problems, *(Problem(key, text) for key in sweep_keys)])
        if several := [each.key_or_group for each in parsed if each.is_sweep_override()]:
            text = "has several values, which makes a sweep. Add -m, or give one value (quote text with a comma)."
            raise ConfigError([*problems, *(Problem(key, text) for key in several)])
        return compose_one(parsed, composer, problems)


def compose_tree(overrides: Sequence[str], config_dir: Path | None = None) -> tuple[DictConfig, dict[str, str]]:
    """Return (composed config as a tree, {group: selected file}); the tree is neither resolved nor checked.

    Raises:
        ConfigError: the overrides do not compose.
    """
    parsed = parse_overrides(overrides)
    with open_composer(config_dir) as composer:
        if unknown := composer.unknown(parsed):
            raise ConfigError(unknown.values())
        try:
            return composer.tree(_with_shape_of_weights(parsed))
        except COMPOSITION_ERRORS as error:
            raise _not_composed(error) from error


def compose_one(parsed: Sequence[Override], composer: "Composer", known: Sequence[Problem]) -> ParsedConfig:
    """Return the parsed config of one run, composed from the overrides `parsed`.

    `known`: problems of other arguments, which are added to its problems.
    """
    unknown = composer.unknown(parsed)
    problems = [*known, *unknown.values()]
    keys = {each.key_or_group for each in parsed}
    try:
        if branching := read_branching(parsed, composer.config_dir):
            sound = [each for each in parsed if each.key_or_group not in unknown]
            tree = branch_tree(branching, sound, composer.tree([])[0], composer.group)
            fill_steps(tree, keys, of_file=True)
        else:
            sound = [each for each in _with_shape_of_weights(parsed) if each.key_or_group not in unknown]
            tree, _ = composer.tree(sound)
            try:
                fill_from_weights(tree, keys)
            except ConfigError as error:
                problems += error.problems
                tree, unknown["model"] = _with_default_model(sound, composer), error.problems[0]
            with gathered(problems):
                fill_steps(tree, keys)
        reading = read_tree(tree, stand_ins=unknown)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    except COMPOSITION_ERRORS as error:
        raise ConfigError([*problems, *_not_composed(error).problems]) from error
    # Without the preset or an override, the rest is not the intended run, so rules are not applied.
    sound_part = None if known or "recipe" in unknown else reading.config
    return ParsedConfig(sound_part, (*problems, *reading.problems))


def recipe_sweep(typed: Sequence[Override], composer: "Composer") -> tuple[list[str], list[str]]:
    """Return the sweep of the selected preset: (`hydra.sweeper.params` as overrides, lines of `sweep.also`).

    Parameters that `typed` overrides are omitted. Both are empty for the preset of a single run.

    Raises:
        ConfigError: several presets are selected, and one of them is a sweep.
    """
    chosen = [each for each in typed if each.key_or_group == "recipe"]
    if not chosen and not any(each.key_or_group in ("sweep", "sweep.also") for each in typed):
        return [], []
    for word in composer.choices(chosen[-1]) if chosen and chosen[-1].is_sweep_override() else []:
        if any(recipe_sweep(parse_overrides([word]), composer)):
            text = f"has several values, but {word} is a sweep itself, and its values would be ignored."
            raise ConfigError(Problem("recipe", f"{text} Give it alone."))
    try:
        composed = composer.compose([each for each in typed if not each.is_sweep_override()])
    except COMPOSITION_ERRORS:
        return [], []  # the same composition follows for each job, and reports the problem there
    keys = {each.key_or_group for each in typed}
    params = [f"{key}={value}" for key, value in composed.sweep_params.items() if key not in keys]
    return params, list(composed.sweep_keys().also)


def _with_shape_of_weights(parsed: Sequence[Override]) -> list[Override]:
    """Return the overrides, with `model=from_weights` added if initial weights are given without a model.

    `model.init_from=null` means random weights.
    """
    named = [each.value() for each in parsed if each.key_or_group == INIT_FROM and not each.is_delete()]
    if all(value is None for value in named) or any(each.key_or_group == "model" for each in parsed):
        return list(parsed)
    return [*parsed, *parse_overrides([f"model={FROM_WEIGHTS}"])]


def _with_default_model(parsed: Sequence[Override], composer: "Composer") -> DictConfig:
    """Return the tree of the overrides with the default model, because the given weights cannot be read.

    Keys that others depend on are then present, so no other problem is reported because of it.
    """
    default = composer.tree([])[1]["model"]
    others = [each for each in parsed if each.key_or_group.partition(".")[0] != "model"]
    return composer.tree([*others, *parse_overrides([f"model={default}"])])[0]


def _not_composed(error: Exception) -> ConfigError:
    """Return the ConfigError for an `error` of Hydra's composition."""
    text = " ".join(str(error or error.__cause__).split())
    if isinstance(error, RecursionError):
        text = "defaults lists of files form a cycle. Remove one of the references."
    elif isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        if (meant := group.rpartition("/")[2]) != group and meant in group_names():
            text = f"a defaults list has `{meant}: {name}`. In a preset, write `- override /{meant}: {name}`."
        else:
            hint = did_you_mean(name, error.options or ())
            text = f"a defaults list names {group}={name}; there is no '{name}'.{hint}"
    elif isinstance(error, OmegaConfBaseException):
        text = f"{first_line(error)}."
    return ConfigError(Problem(getattr(error, "full_key", None) or "composition", text))


class Composed(NamedTuple):
    """The merged files and overrides, unresolved and unchecked; a private copy of the caller."""

    tree: DictConfig
    """The tree without Hydra's node; `recipe` is the name of the selected preset."""
    choices: dict[str, str]
    """{group: selected file}."""
    sweep_params: dict[str, Any]
    """The preset's `hydra.sweeper.params`."""

    def sweep_keys(self) -> SweepConfig:
        """Return the validated keys below `sweep`. Raises ConfigError with all problems."""
        node = self.tree.get("sweep")
        values = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
        return read_sweep_keys({} if values is None else values)


class Composer:
    """Composer of config trees from the files of one search path; it needs an initialized Hydra (`open_composer`).

    Composition reads and merges about twenty files, which takes a tenth of a second, but the jobs of a sweep mostly
    differ in single values. Hydra applies those last, in order, to the merged files; this class does the same on a
    cached merge.
    """

    def __init__(self, search: Sequence[str], config_dir: Path | None = None):
        """`search`: overrides of Hydra's search path that add `config_dir`."""
        self.search = list(search)
        self.config_dir = config_dir
        self._bases: dict[tuple[str, ...], bytes] = {}  # pickled, because copying is seven times as fast as deepcopy
        self._options: dict[str, list[str]] = {}

    def options(self, group: str) -> list[str]:
        """Return the files that `group=` can select; [] if there is no such group."""
        if group not in self._options:
            self._options[group] = group_options(group, self.search)
        return self._options[group]

    def unknown(self, parsed: Sequence[Override]) -> dict[str, Problem]:
        """Return {group: problem} of the overrides that select a file which does not exist."""
        found = {each.key_or_group: unknown_option(each, self.options(each.key_or_group)) for each in parsed}
        return {group: problem for group, problem in found.items() if problem}

    def choices(self, parsed: Override) -> list[str]:
        """Return a sweep override as single ones: `a=1,2` as ["a=1", "a=2"]; see `choices_of`."""
        return choices_of(parsed, self.options(parsed.key_or_group))

    def group(self, group: str, name: str) -> Any:
        """Return the tree of the group that `group=name` selects."""
        return self.tree(parse_overrides([f"{group}={name}"]))[0][group]

    def tree(self, parsed: Sequence[Override]) -> tuple[DictConfig, dict[str, str]]:
        """Return (composed config of one run as a tree, {group: selected file}).

        Raises:
            ConfigError: a rule of `precision.modules.casts` names a recipe that it cannot use.
            HydraException, OmegaConfBaseException: raised by Hydra.
        """

        def precision(name: str) -> DictConfig:
            node: DictConfig = self.compose(parse_overrides([f"precision={name}"])).tree.precision
            return node

        tree, choices, _ = self.compose(parsed)
        with open_dict(tree):
            tree.pop("sweep", None)
            leave_out_observers(tree, parsed)
            give_way_to_cluster(tree, {each.key_or_group for each in parsed})
        fill_named_casts(tree, precision, self.config_dir)
        return tree, choices

    def compose(self, parsed: Sequence[Override]) -> Composed:
        """Return Hydra's composition of the overrides.

        Raises:
            HydraException, OmegaConfBaseException: raised by Hydra.
        """
        arguments = [self.forced(each) for each in parsed]
        values = [each for each, word in zip(parsed, arguments, strict=True) if word.startswith(FORCED)]
        base = tuple(word for word in arguments if not word.startswith((FORCED, "~")))
        if any(each.is_delete() or isinstance(each.value(), dict) for each in parsed):
            return self._in_order(parsed, arguments, base)  # the order of overrides matters
        try:
            composed = self._base(base)
            for each in values:
                OmegaConf.update(composed.tree, each.key_or_group, each.value(), force_add=True)
        except (HydraException, OmegaConfBaseException):
            return self._composed(arguments)  # for Hydra's own error message
        return composed

    def forced(self, parsed: Override) -> str:
        """Return the override in a form that Hydra accepts for unknown keys, which validation reports later."""
        word = parsed.input_line or ""
        if parsed.is_delete():
            return word
        if self.options(parsed.key_or_group):
            return word.lstrip("+")  # all groups are in the defaults list already
        return FORCED + word.lstrip("+")

    def _base(self, base: tuple[str, ...]) -> Composed:
        """Return the composition of group selections only; a group selected next to a preset is its file alone."""
        if base not in self._bases:
            composed = self._composed(list(base))
            for group, node in self._replaced(base, composed).items():
                composed.tree[group] = node
            self._bases[base] = pickle.dumps(composed)
        found: Composed = pickle.loads(self._bases[base])
        return found

    def _in_order(self, parsed: Sequence[Override], arguments: list[str], base: tuple[str, ...]) -> Composed:
        """Return the composition if the order of overrides matters, with selected groups replacing a preset's keys."""
        composed = self._composed(arguments)
        try:
            replaced = self._replaced(base, self._composed(list(base)))
        except (HydraException, OmegaConfBaseException):
            return composed
        for group, node in replaced.items():
            composed.tree[group] = node
            for each in parsed:
                if each.key_or_group.startswith(f"{group}."):
                    _apply(composed.tree, each)
        return composed

    def _replaced(self, base: Sequence[str], composed: Composed) -> dict[str, Any]:
        """Return {group: keys of its selected file} for groups of `base` in which the preset sets keys for another
        file.

        A file that the preset selects or sweeps over itself is not replaced, since the preset's keys are meant for it.
        """
        recipe = [word for word in base if word.partition("=")[0] == "recipe"]
        chosen = [group for word in base if (group := word.partition("=")[0]) in KEPT]
        if not recipe or not chosen or composed.choices.get("recipe") is None:
            return {}
        own = self._base(tuple(recipe[-1:]))
        chosen = [group for group in chosen if composed.choices.get(group) not in self._own_choices(own, group)]
        if not chosen:
            return {}
        chosen_files = [f"{group}={name}" for group, name in composed.choices.items() if group in group_names()]
        plain = self._base(tuple(word for word in chosen_files if not word.startswith("recipe="))).tree
        found = {}
        for group in chosen:
            node, now = plain[group], composed.tree[group]
            if isinstance(node, DictConfig) and isinstance(now, DictConfig):
                values: Any = OmegaConf.to_container(now, resolve=False)
                for key in values.keys() & set(KEPT[group]):
                    OmegaConf.update(node, key, values[key], force_add=True)
                found[group] = node
        return found

    def _own_choices(self, own: Composed, group: str) -> set[str]:
        """Return the files of `group` that a preset selects in its defaults list or sweeps over."""
        lines = [f"{key}={value}" for key, value in own.sweep_params.items()]
        lines += [word for line in own.tree.get("sweep", {}).get("also") or [] for word in str(line).split()]
        swept = [each for each in parse_overrides(lines) if each.key_or_group == group]
        values = [word.partition("=")[2] for each in swept for word in self.choices(each)]
        return {str(own.choices.get(group)), *values}

    def _composed(self, arguments: list[str]) -> Composed:
        tree = compose("config", overrides=[*self.search, *arguments], return_hydra_config=True)
        choices = dict(tree.hydra.runtime.choices)
        params = dict(tree.hydra.sweeper.get("params") or {})
        with open_dict(tree):
            tree.recipe = choices.get("recipe")
            del tree["hydra"]
        return Composed(tree, choices, params)


@contextmanager
def open_composer(config_dir: Path | None) -> Iterator[Composer]:
    """Context that initializes Hydra on the shipped files, then `config_dir`, and yields a composer for them."""
    with open_hydra(config_dir) as search:
        yield Composer(search, config_dir) if config_dir else shipped_composer()


@cache
def shipped_composer() -> Composer:
    """Return the composer of the shipped groups and presets; cached, since these files do not change."""
    return Composer([])


def _apply(tree: DictConfig, override: Override) -> None:
    """Apply one override of a value to `tree` in place, as Hydra does."""
    if not override.is_delete():
        OmegaConf.update(tree, override.key_or_group, override.value(), merge=True, force_add=True)
        return
    above, _, key = override.key_or_group.rpartition(".")
    node = OmegaConf.select(tree, above)
    if not isinstance(node, DictConfig) or key not in node:
        raise HydraException(f"Could not delete from config. '{override.key_or_group}' does not exist.")
    with open_dict(node):
        del node[key]
