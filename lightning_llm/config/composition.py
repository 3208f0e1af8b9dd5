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

from lightning_llm.config.overrides import forced

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
        if any(each.is_delete() or isinstance(each.value(), dict) for each in parsed):
            return self._composed(arguments)  # of a group or of its values, and then the order counts
        base = tuple(word for word in arguments if not word.startswith(FORCED))
        try:
            if base not in self._bases:
                self._bases[base] = pickle.dumps(self._composed(list(base)))
            composed: Composed = pickle.loads(self._bases[base])
            for each in values:
                OmegaConf.update(composed.tree, each.key_or_group, each.value(), force_add=True)
        except (HydraException, OmegaConfBaseException):
            return self._composed(arguments)  # for Hydra's own words on what is wrong
        return composed

    def _composed(self, arguments: list[str]) -> Composed:
        tree = compose("config", overrides=[*self.search, *arguments], return_hydra_config=True)
        choices = dict(tree.hydra.runtime.choices)
        params = dict(tree.hydra.sweeper.get("params") or {})
        with open_dict(tree):
            tree.recipe = choices.get("recipe")
            del tree["hydra"]
        return Composed(tree, choices, params)


@cache
def shipped_composer() -> Composer:
    """Return the one composer of the shipped groups and recipes, whose files stay as they are while a process lives."""
    return Composer([])
