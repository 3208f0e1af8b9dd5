"""The shipped config files as sources for Hydra: recipes, of which it reads the chosen one alone, and groups.

The recipes' folder is plural and the Hydra group singular, so Hydra's own reader of packages would not find them. That
reader finds the groups, and would read each file anew for each composition: a quarter of what one takes.
"""

import pickle
from collections.abc import Mapping
from functools import cache
from importlib.resources.abc import Traversable

from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from lightning_llm.config.recipes import ENDING, option_files

SCHEME, PROVIDER, GROUP = "recipes", "lightning_llm.recipes", "recipe"
GROUPS_SCHEME, PACKAGE_SCHEME = "groups", "pkg"


@cache
def register_sources() -> None:
    """Have Hydra find every shipped recipe in its `recipe` group, and read groups once, from its next start on."""
    for plugin in (RecipeSource, GroupSource, _SearchPath):
        Plugins.instance().register(plugin)


class _SearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for each in search_path.get_path():
            if each.provider == "main" and each.path is not None:  # what Hydra was initialised with
                each.path = each.path.replace(f"{PACKAGE_SCHEME}://", f"{GROUPS_SCHEME}://")
        search_path.append(PROVIDER, f"{SCHEME}://{PROVIDER}")


class RecipeSource(ConfigSource):
    """Reads recipes by `recipe/NAME`, or `recipe/FOLDER/NAME`. Their keys are global."""

    @staticmethod
    def scheme() -> str:
        """Return what stands before `://` in a search path."""
        return SCHEME

    def available(self) -> bool:
        """Return that they are there, as the package is."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether there is such a group or subgroup."""
        return any(name.startswith(f"{config_path.rstrip('/')}/") for name in _files())

    def is_config(self, config_path: str) -> bool:
        """Return whether there is such a recipe."""
        return config_path.removesuffix(ENDING) in _files()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names in a group: of its subgroups, of its recipes, or of both."""
        folder, found = f"{config_path.rstrip('/')}/", set[str]()
        for name in _files():
            if name.startswith(folder):
                first, below, _ = name.removeprefix(folder).partition("/")
                if results_filter in (None, ObjectType.GROUP if below else ObjectType.CONFIG):
                    found.add(first)
        return sorted(found)

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a recipe's content."""
        tree = OmegaConf.create(_files()[config_path.removesuffix(ENDING)].read_text(encoding="utf-8"))
        return ConfigResult(self.provider, self.full_path(), tree, {"package": "_global_"})


class GroupSource(ImportlibResourcesConfigSource):
    """Reads the files of a package, which stay as they are while a process lives, once each."""

    _read: dict[tuple[str, str], bytes] = {}  # pickled: Hydra changes what it is given

    @staticmethod
    def scheme() -> str:
        """Return what stands before `://` in a search path."""
        return GROUPS_SCHEME

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a file's content."""
        key = self.path, config_path
        if key not in self._read:
            self._read[key] = pickle.dumps(super().load_config(config_path))
        found: ConfigResult = pickle.loads(self._read[key])
        return found


@cache
def _files() -> Mapping[str, Traversable]:
    return {f"{GROUP}/{name}": file for name, file in option_files(GROUP).items()}
