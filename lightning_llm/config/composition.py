"""Hydra's composition of a config tree, made once for all jobs of a sweep that choose the same files.

Composing reads and merges some twenty files, which takes a tenth of a second; the jobs of a sweep mostly differ in
single values. Hydra applies those to the merged files, last, in the order they are typed, and so does this.
"""

import pickle
from collections.abc import Sequence

from hydra import compose
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lightning_llm.config.overrides import forced

FORCED = "++"


class Composer:
    """Composes trees over one search path, inside an initialised Hydra. A tree that was returned is the caller's."""

    def __init__(self, search: Sequence[str]):
        self.search = list(search)
        self._bases: dict[tuple[str, ...], bytes] = {}  # pickled: seven times as fast to copy as by deepcopy

    def tree(self, parsed: Sequence[Override]) -> tuple[DictConfig, dict[str, str]]:
        """Return what Hydra composes of the overrides, less its own node, and the file chosen for each group.

        `recipe` is the chosen one's name.

        Raises:
            HydraException, OmegaConfBaseException: as Hydra does.
        """
        words = self._forced(parsed)
        values = [each for each, word in zip(parsed, words, strict=True) if word.startswith(FORCED)]
        if any(each.is_delete() or isinstance(each.value(), dict) for each in parsed):
            return self._composed(words)  # of a group or of its values, and then the order counts
        base = tuple(word for word in words if not word.startswith(FORCED))
        try:
            if base not in self._bases:
                self._bases[base] = pickle.dumps(self._composed(list(base)))
            tree, choices = pickle.loads(self._bases[base])
            for each in values:
                OmegaConf.update(tree, each.key_or_group, each.value(), force_add=True)
        except (HydraException, OmegaConfBaseException):
            return self._composed(words)  # for Hydra's own words on what is wrong
        return tree, choices

    def compose(self, parsed: Sequence[Override]) -> DictConfig:
        """Return what Hydra composes of the overrides, its own node included. Raises what `tree` does."""
        return compose("config", overrides=[*self.search, *self._forced(parsed)], return_hydra_config=True)

    def _forced(self, parsed: Sequence[Override]) -> list[str]:
        return [forced(each, self.search) for each in parsed]

    def _composed(self, words: list[str]) -> tuple[DictConfig, dict[str, str]]:
        tree = compose("config", overrides=[*self.search, *words], return_hydra_config=True)
        choices = dict(tree.hydra.runtime.choices)
        with open_dict(tree):
            tree.recipe = choices.get("recipe")
            del tree["hydra"]
        return tree, choices
