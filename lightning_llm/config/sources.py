"""Config files as Hydra's sources: the shipped recipes and groups, and the user's groups in `--config-dir DIR`.

Hydra's own readers do not serve: the one of packages looks for `recipe/` (the folder is `recipes/`) and reads each file
anew for each composition, a quarter of its time; the one of folders takes an empty file for an empty mapping, and a
recipe without `# @package _global_` for keys below `recipe`. The Python files of `--config-dir` are `workspace`'s.
"""

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from hydra import initialize_config_module
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.base.registry import Registry
from lightning_llm.config.config_hash import flatten
from lightning_llm.config.overrides import hydra_setting
from lightning_llm.config.recipes import ENDING, folder_problems, option_files
from lightning_llm.config.schema.aliases import VALUES
from lightning_llm.config.schema.data import loader_of
from lightning_llm.config.schema.optim import OPTIMIZERS, SCHEDULES
from lightning_llm.config.workspace import default_outputs
from lightning_llm.config.yaml_file import read_mapping

CONFIG_MODULE = "lightning_llm.conf"
RECIPES_MODULE, RECIPE = "lightning_llm.recipes", "recipe"
NAMED_AFTER_FILE = ("model", "data", "precision", "parallel", "trainer", "spikes", "cluster")
"""Groups with a free `name`; in the others it is the name of a kind."""
KINDS: Mapping[str, Registry[Any]] = {"optim": OPTIMIZERS, "schedule": SCHEDULES}
"""Groups of one registered kind per file. An installed package may add a kind without a file."""


@contextmanager
def open_hydra(config_dir: Path | None) -> Iterator[list[str]]:
    """Initialize Hydra on the shipped files, with `config_dir` behind them; yield overrides of its search path.

    Raises:
        ConfigError: `config_dir` is no folder, or has files that Hydra would not read.
    """
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(Problem("--config-dir", f"{config_dir} is no folder. Give a folder of config groups."))
    if config_dir is not None and (problems := folder_problems(config_dir)):
        raise ConfigError(problems)
    _register_sources()
    OmegaConf.register_new_resolver("outputs_root", default_outputs, replace=True)
    GlobalHydra.instance().clear()
    with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
        if config_dir is None:
            yield []
        else:
            where = f"{ConfigDirSource.scheme()}://{config_dir.absolute()}"
            yield [f"hydra.searchpath=[{QuotedString(where, Quote.single).with_quotes()}]"]


def group_options(group: str, search: Sequence[str]) -> list[str]:
    """Return the names that `group=` takes, recipes in subfolders as "sub/name"; empty where there is no such group."""
    if not group or "." in group:  # no group has a dot in its name, and Hydra takes milliseconds for an answer
        return []
    loader = GlobalHydra.instance().config_loader()
    options = list(loader.get_group_options(group, overrides=list(search)))
    for child in loader.get_group_options(group, ObjectType.GROUP, overrides=list(search)):
        options += [f"{child}/{name}" for name in group_options(f"{group}/{child}", search)]
    return options


def unknown_option(parsed: Override, options: Sequence[str]) -> Problem | None:
    """Return the problem of a name chosen for a group that is none of its `options`; None where no group is meant."""
    if parsed.is_delete() or parsed.is_sweep_override() or not options:
        return None
    value, group = parsed.value(), parsed.key_or_group
    if isinstance(value, list) and group != "callbacks":
        text = f"is a list, whose files would be merged into one. Give one, or several with -m: {group}=a,b."
        return Problem(group, text)
    value = "null" if value is None else value
    if value in options or isinstance(value, list):
        return None
    return Problem(group, f"there is no {str(value)!r}.{_suggestion(group, str(value), options)}")


def _suggestion(group: str, value: str, options: Sequence[str]) -> str:
    """Return what to write instead of `value`: our name for it, the loader of a file, the nearest option."""
    if (ours := VALUES.get(group, {}).get(value)) in options:
        return f" Did you mean '{ours}'?"
    loader = loader_of(value) if group == "data" else None
    if loader is not None:
        return f" A file is read by data={loader} data.sources.{loader}.path={value}."
    if (group, value) == ("cluster", "measured"):
        return " `lightning-llm health` measures machines and writes it; then add --config-dir FOLDER."
    if value in KINDS.get(group, ()):
        file = f"DIR/{group}/{value}.yaml with `name: {value}` and add --config-dir DIR"
        return f" The {KINDS[group].noun} of that name has no file. Write {file}, or set {group}.name={value}."
    return did_you_mean(value, options)


@cache
def _register_sources() -> None:
    for plugin in (RecipeSource, GroupSource, ConfigDirSource, _SearchPath):
        Plugins.instance().register(plugin)


class _SearchPath(SearchPathPlugin):
    """Replaces Hydra's reader of the package that it is initialized with, and adds the recipes."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for each in search_path.get_path():
            if each.provider == "main" and each.path is not None:
                each.path = each.path.replace("pkg://", f"{GroupSource.scheme()}://")
        search_path.append(RECIPES_MODULE, f"{RecipeSource.scheme()}://{RECIPES_MODULE}")


class RecipeSource(ConfigSource):
    """Reads recipes by `recipe/NAME`, or `recipe/FOLDER/NAME`. Their keys are global."""

    @staticmethod
    def scheme() -> str:
        """Return what stands before `://` in a search path."""
        return "recipes"

    def available(self) -> bool:
        """Return True: they are part of the package."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether there is such a group or subgroup."""
        return any(name.startswith(f"{config_path.rstrip('/')}/") for name in _recipe_files())

    def is_config(self, config_path: str) -> bool:
        """Return whether there is such a recipe."""
        return config_path.removesuffix(ENDING) in _recipe_files()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names in a group: of its subgroups, of its recipes, or of both."""
        folder, found = f"{config_path.rstrip('/')}/", set[str]()
        for name in _recipe_files():
            if name.startswith(folder):
                first, below, _ = name.removeprefix(folder).partition("/")
                if results_filter in (None, ObjectType.GROUP if below else ObjectType.CONFIG):
                    found.add(first)
        return sorted(found)

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a recipe's content."""
        tree = OmegaConf.create(_recipe_files()[config_path.removesuffix(ENDING)].read_text(encoding="utf-8"))
        return ConfigResult(self.provider, self.full_path(), tree, {"package": "_global_"})


class GroupSource(ImportlibResourcesConfigSource):
    """Reads each file of a package once: they do not change while a process lives."""

    _read: dict[tuple[str, str], bytes] = {}  # pickled: Hydra changes what it is given

    @staticmethod
    def scheme() -> str:
        """Return what stands before `://` in a search path."""
        return "groups"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a file's content."""
        key = self.path, config_path
        if key not in self._read:
            self._read[key] = pickle.dumps(super().load_config(config_path))
        found: ConfigResult = pickle.loads(self._read[key])
        return found


@cache
def _recipe_files() -> Mapping[str, Traversable]:
    return {f"{RECIPE}/{name}": file for name, file in option_files(RECIPE).items()}


class ConfigDirSource(ConfigSource):
    """Reads groups below one folder; what is wrong with a file that is chosen is a `ConfigError`."""

    @staticmethod
    def scheme() -> str:
        """Return what stands before `://` in a search path."""
        return "config-dir"

    def available(self) -> bool:
        """Return whether the folder is there."""
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        """Return whether there is such a folder."""
        return Path(self.path, config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        """Return whether something goes by that name; what it is, reading it says."""
        file = self._file(config_path)
        return file.is_symlink() or file.exists()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names in a group: of its subfolders, of its files without their ending, or of both."""
        folder, found = Path(self.path, config_path), []
        for entry in folder.iterdir():
            if entry.name.endswith(ENDING):
                if results_filter in (None, ObjectType.CONFIG):
                    found.append(entry.name.removesuffix(ENDING))
            elif results_filter in (None, ObjectType.GROUP) and _is_below(entry, folder):
                found.append(entry.name)
        return sorted(found)

    def load_config(self, config_path: str) -> ConfigResult:
        """Return a file's content. Raises ConfigError with all that is wrong with it."""
        file, group = self._file(config_path), config_path.partition("/")[0]
        key = f"{config_path.rpartition('/')[0]}={config_path.rpartition('/')[2]}"
        if group == "recipe":
            key = f"recipe={config_path.removeprefix('recipe/')}"
        tree = read_mapping(file, key)
        problems = [Problem(key, f"{file}: {text}") for text in (*_defaults_faults(tree), *_hydra_faults(tree))]
        if problems:
            raise ConfigError(problems)
        if group in NAMED_AFTER_FILE and "defaults" in tree and "name" not in tree:
            tree["name"] = config_path.rpartition("/")[2]  # and not as the file that it is built on
        return ConfigResult(
            provider=self.provider, path=self.full_path(), config=tree, header=_header(file, key, group)
        )

    def _file(self, config_path: str) -> Path:
        return Path(self.path, f"{config_path.removesuffix(ENDING)}{ENDING}")


def _is_below(entry: Path, folder: Path) -> bool:
    """Return whether `entry` is a subfolder with files of ours, and no link to a folder above, round in a circle."""
    if not entry.is_dir() or entry.name == "__pycache__":
        return False
    return not folder.resolve().is_relative_to(entry.resolve())


def _header(file: Path, key: str, group: str) -> dict[str, str | None]:
    """Return the file's `# @package` line as Hydra takes it; a recipe's keys are global, with or without one."""
    try:
        header = ConfigSource._get_header_dict(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ConfigError(Problem(key, f"{file}: {error}. Write `# @package NAME`, or leave the line out.")) from error
    if group == "recipe":
        if header["package"] not in (None, "_global_"):
            text = f"{file}: the keys of a recipe are global. Leave out `# @package {header['package']}`."
            raise ConfigError(Problem(key, text))
        header["package"] = "_global_"
    return header


def _defaults_faults(tree: DictConfig) -> Iterator[str]:
    """Yield what is wrong with the form of a `defaults` list, of which Hydra asserts some and ignores some."""
    items = OmegaConf.to_container(tree, resolve=False)
    items = items.get("defaults", []) if isinstance(items, dict) else []
    if not isinstance(items, list):
        yield "`defaults` must be a list, of lines like `- override /precision: mxfp8`."
        return
    for item in items:
        if isinstance(item, dict) and len(item) == 1:
            ((group, value),) = item.items()
            names = value if isinstance(value, list) else [] if value is None else [value]
            if "hydra/" in str(group):
                yield f"`defaults` chooses {group}: {hydra_setting(str(group).rpartition(' ')[2].lstrip('/'))}"
            elif not all(isinstance(each, str) for each in (group, *names)):
                yield f"`defaults` has `{group}: {value}`, which names no file of a group."
        elif not isinstance(item, str):
            yield f"`defaults` has `{item}`. Write `- override /precision: mxfp8`, `- _self_`, or the name of a file."


def _hydra_faults(tree: DictConfig) -> Iterator[str]:
    """Yield each setting of Hydra's own that would be read by nobody."""
    node = tree.get("hydra")
    if node is None:
        return
    if not isinstance(node, DictConfig):
        yield f"`hydra` must be a mapping, and is {'a list' if isinstance(node, ListConfig) else repr(node)}."
        return
    settings: Any = OmegaConf.to_container(node, resolve=False)
    for key in flatten(settings, "hydra."):
        if not key.startswith("hydra.sweeper.params"):
            yield f"{key}: {hydra_setting(key)}"
