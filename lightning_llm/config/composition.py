"""Hydra's composition of a config tree, made once for all jobs of a sweep that choose the same files.

Composing reads and merges some twenty files, which takes a tenth of a second; the jobs of a sweep mostly differ in
single values. Hydra applies those to the merged files, last, in the order they are typed, and so does this.
"""

import pickle
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightning_llm.config.overrides import choices_of, forced, parse_overrides
from lightning_llm.config.recipes import group_names

FORCED = "++"
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, RecursionError, ValueError)
"""What Hydra raises for files and arguments that do not compose; a ValueError for keywords of a defaults list."""


class Composed(NamedTuple):
    """What the chosen files and the overrides make, nothing resolved or checked; the caller's own."""

    tree: DictConfig
    """Less Hydra's own node; `recipe` is the chosen one's name."""
    choices: dict[str, str]
    """The file chosen for each group."""
    sweep_params: dict[str, Any]
    """The recipe's `hydra.sweeper.params`."""


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
"""{group: keys of a recipe that stay where another file of that group is chosen, which replaces all others}.

They belong to the run: how much it learns from at a time, and from which weights. Groups that are not here (trainer,
callbacks, launcher) have no files that exclude each other, so all of a recipe's keys below them stay."""


class Composer:
    """Composes trees over one search path, inside an initialised Hydra. What it composed once it keeps."""

    def __init__(self, search: Sequence[str], config_dir: Path | None = None):
        """`search`: overrides of Hydra's search path, which lead to `config_dir`."""
        self.search = list(search)
        self.config_dir = config_dir
        self._bases: dict[tuple[str, ...], bytes] = {}  # pickled: seven times as fast to copy as by deepcopy

    def compose(self, parsed: Sequence[Override]) -> Composed:
        """Return what Hydra composes of the overrides.

        Raises:
            HydraException, OmegaConfBaseException: as Hydra does.
        """
        arguments = [forced(each, self.search) for each in parsed]
        values = [each for each, word in zip(parsed, arguments, strict=True) if word.startswith(FORCED)]
        base = tuple(word for word in arguments if not word.startswith((FORCED, "~")))
        if any(each.is_delete() or isinstance(each.value(), dict) for each in parsed):
            return self._in_order(parsed, arguments, base)  # of a group or of its values, and then the order counts
        try:
            composed = self._base(base)
            for each in values:
                OmegaConf.update(composed.tree, each.key_or_group, each.value(), force_add=True)
        except (HydraException, OmegaConfBaseException):
            return self._composed(arguments)  # for Hydra's own words on what is wrong
        return composed

    def _base(self, base: tuple[str, ...]) -> Composed:
        """Return what choices of groups alone compose; a group that is chosen beside a recipe is its file, whole."""
        if base not in self._bases:
            composed = self._composed(list(base))
            for group, node in self._replaced(base, composed).items():
                composed.tree[group] = node
            self._bases[base] = pickle.dumps(composed)
        found: Composed = pickle.loads(self._bases[base])
        return found

    def _in_order(self, parsed: Sequence[Override], arguments: list[str], base: tuple[str, ...]) -> Composed:
        """Return what Hydra composes where the order of overrides counts, with the groups that replace a recipe's."""
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
        """Return {group: its chosen file's keys} of groups in `base` below which the recipe sets keys for another file.

        A choice that the recipe makes itself, or sweeps over, is the one that its keys are for.
        """
        recipe = [word for word in base if word.partition("=")[0] == "recipe"]
        chosen = [group for word in base if (group := word.partition("=")[0]) in KEPT]
        if not recipe or not chosen or composed.choices.get("recipe") is None:
            return {}
        own = self._base(tuple(recipe[-1:]))
        chosen = [group for group in chosen if composed.choices.get(group) not in self._own_choices(own, group)]
        if not chosen:
            return {}
        files = [f"{group}={name}" for group, name in composed.choices.items() if group in group_names()]
        plain = self._base(tuple(word for word in files if not word.startswith("recipe="))).tree
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
        """Return the files of `group` that a recipe chooses: by its defaults list, or as values of its sweep."""
        lines = [f"{key}={value}" for key, value in own.sweep_params.items()]
        lines += [word for line in own.tree.get("sweep", {}).get("also") or [] for word in str(line).split()]
        swept = [each for each in parse_overrides(lines) if each.key_or_group == group]
        values = [word.partition("=")[2] for each in swept for word in choices_of(each, self.search)]
        return {str(own.choices.get(group)), *values}

    def _composed(self, arguments: list[str]) -> Composed:
        tree = compose("config", overrides=[*self.search, *arguments], return_hydra_config=True)
        choices = dict(tree.hydra.runtime.choices)
        params = dict(tree.hydra.sweeper.get("params") or {})
        with open_dict(tree):
            tree.recipe = choices.get("recipe")
            del tree["hydra"]
        return Composed(tree, choices, params)


def _apply(tree: DictConfig, override: Override) -> None:
    """Apply one override of a value to `tree`, in place, as Hydra does."""
    if not override.is_delete():
        OmegaConf.update(tree, override.key_or_group, override.value(), merge=True, force_add=True)
        return
    above, _, key = override.key_or_group.rpartition(".")
    node = OmegaConf.select(tree, above)
    if not isinstance(node, DictConfig) or key not in node:
        raise HydraException(f"Could not delete from config. '{override.key_or_group}' does not exist.")
    with open_dict(node):
        del node[key]


@cache
def shipped_composer() -> Composer:
    """Return the one composer of the shipped groups and recipes, whose files stay as they are while a process lives."""
    return Composer([])
