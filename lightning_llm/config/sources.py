"""Hydra config sources: the shipped presets and groups, and the user's groups in `--config-dir DIR`.

Hydra's sources are not suitable. Its package source expects `recipe/` (the folder is `recipes/`) and reads each file
again for each composition, a quarter of the time. Its folder source reads an empty file as an empty mapping, and puts a
preset without `# @package _global_` below `recipe`. `workspace` imports the Python files of `--config-dir`.
"""

import pickle
from collections.abc import Container, Iterator, Mapping, Sequence
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
"""Groups with a free `name`; in other groups `name` selects a kind."""
KINDS: Mapping[str, Registry[Any]] = {"optim": OPTIMIZERS, "schedule": SCHEDULES}
"""Groups with one registered kind per file. An installed package may add a kind without a file."""


def kinds_without_file(group: str, files: Container[str]) -> dict[str, str]:
    """Return {kind: description} of the group's registered kinds for which there is no config file.

    `files`: names of the group's files. An installed package may add such kinds by entry point; `GROUP.name=KIND`
    selects one.
    """
    if group not in KINDS:
        return {}
    registry = KINDS[group]
    return {name: (registry[name].__doc__ or "").partition("\n")[0] for name in registry if name not in files}


@contextmanager
def open_hydra(config_dir: Path | None) -> Iterator[list[str]]:
    """Context that initializes Hydra on the shipped files; yields overrides that add `config_dir` to its search path.

    Raises:
        ConfigError: `config_dir` is not a folder, or has files that Hydra would not read.
    """
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(Problem("--config-dir", f"is {config_dir}, not a folder. Give a folder with config groups."))
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
    """Return the names of the files that `group=` can select ("FOLDER/NAME" in subfolders); [] if there is no group."""
    if not group or "." in group:  # no group has a dot in its name; asking Hydra takes milliseconds
        return []
    loader = GlobalHydra.instance().config_loader()
    options = list(loader.get_group_options(group, overrides=list(search)))
    for child in loader.get_group_options(group, ObjectType.GROUP, overrides=list(search)):
        options += [f"{child}/{name}" for name in group_options(f"{group}/{child}", search)]
    return options


def unknown_option(parsed: Override, options: Sequence[str]) -> Problem | None:
    """Return the problem of an override that selects a file which is not in `options`, the files of its group.

    None if the file exists, or if the override does not select a file.
    """
    if parsed.is_delete() or parsed.is_sweep_override() or not options:
        return None
    value, group = parsed.value(), parsed.key_or_group
    if isinstance(value, list) and group != "callbacks":
        text = f"is a list, and its files would be merged. Give one, or several with -m: {group}=a,b."
        return Problem(group, text)
    value = "null" if value is None else value
    if value in options or isinstance(value, list):
        return None
    return Problem(group, f"there is no {str(value)!r}.{_suggestion(group, str(value), options)}")


def _suggestion(group: str, value: str, options: Sequence[str]) -> str:
    """Return a suggestion instead of `value`: its name here, the loader of a file, or the nearest option."""
    if (ours := VALUES.get(group, {}).get(value)) in options:
        return f" Did you mean '{ours}'?"
    loader = loader_of(value) if group == "data" else None
    if loader is not None:
        return f" For a file, write data={loader} data.sources.{loader}.path={value}."
    if (group, value) == ("cluster", "measured"):
        return " `lightning-llm health` measures machines and writes this file; then add --config-dir FOLDER."
    if value in KINDS.get(group, ()):
        file = f"DIR/{group}/{value}.yaml with `name: {value}` and add --config-dir DIR"
        return f" The {KINDS[group].noun} of that name has no file. Write {file}, or set {group}.name={value}."
    return did_you_mean(value, options)


@cache
def _register_sources() -> None:
    for plugin in (RecipeSource, GroupSource, ConfigDirSource, _SearchPath):
        Plugins.instance().register(plugin)


class _SearchPath(SearchPathPlugin):
    """Replaces Hydra's source for the shipped package, and adds the presets."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for each in search_path.get_path():
            if each.provider == "main" and each.path is not None:
                each.path = each.path.replace("pkg://", f"{GroupSource.scheme()}://")
        search_path.append(RECIPES_MODULE, f"{RecipeSource.scheme()}://{RECIPES_MODULE}")


class RecipeSource(ConfigSource):
    """Source of presets as `recipe/NAME` or `recipe/FOLDER/NAME`. Their keys are global."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of this source in a search path."""
        return "recipes"

    def available(self) -> bool:
        """Return True, because presets are part of the package."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether there is such a group or subgroup."""
        return any(name.startswith(f"{config_path.rstrip('/')}/") for name in _recipe_files())

    def is_config(self, config_path: str) -> bool:
        """Return whether there is such a preset."""
        return config_path.removesuffix(ENDING) in _recipe_files()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names of a group's subgroups, presets, or both."""
        folder, found = f"{config_path.rstrip('/')}/", set[str]()
        for name in _recipe_files():
            if name.startswith(folder):
                first, below, _ = name.removeprefix(folder).partition("/")
                if results_filter in (None, ObjectType.GROUP if below else ObjectType.CONFIG):
                    found.add(first)
        return sorted(found)

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the content of a preset."""
        tree = OmegaConf.create(_recipe_files()[config_path.removesuffix(ENDING)].read_text(encoding="utf-8"))
        return ConfigResult(self.provider, self.full_path(), tree, {"package": "_global_"})


class GroupSource(ImportlibResourcesConfigSource):
    """Source of the shipped package that reads each file once per process."""

    _read: dict[tuple[str, str], bytes] = {}  # pickled, because Hydra modifies results

    @staticmethod
    def scheme() -> str:
        """Return the scheme of this source in a search path."""
        return "groups"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the content of a file."""
        key = self.path, config_path
        if key not in self._read:
            self._read[key] = pickle.dumps(super().load_config(config_path))
        found: ConfigResult = pickle.loads(self._read[key])
        return found


@cache
def _recipe_files() -> Mapping[str, Traversable]:
    return {f"{RECIPE}/{name}": file for name, file in option_files(RECIPE).items()}


class ConfigDirSource(ConfigSource):
    """Source of the config groups in `--config-dir`; raises ConfigError with all problems of a selected file."""

    @staticmethod
    def scheme() -> str:
        """Return the scheme of this source in a search path."""
        return "config-dir"

    def available(self) -> bool:
        """Return whether the folder exists."""
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        """Return whether there is such a folder."""
        return Path(self.path, config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        """Return whether there is anything of that name; reading it reports other errors."""
        file = self._file(config_path)
        return file.is_symlink() or file.exists()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names of a group's subfolders, of its files without suffix, or of both."""
        folder, found = Path(self.path, config_path), []
        for entry in folder.iterdir():
            if entry.name.endswith(ENDING):
                if results_filter in (None, ObjectType.CONFIG):
                    found.append(entry.name.removesuffix(ENDING))
            elif results_filter in (None, ObjectType.GROUP) and _is_below(entry, folder):
                found.append(entry.name)
        return sorted(found)

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the content of a file. Raises ConfigError with all its problems."""
        file, group = self._file(config_path), config_path.partition("/")[0]
        key = f"{config_path.rpartition('/')[0]}={config_path.rpartition('/')[2]}"
        if group == "recipe":
            key = f"recipe={config_path.removeprefix('recipe/')}"
        tree = read_mapping(file, key)
        problems = [Problem(key, f"{file}: {text}") for text in (*_defaults_faults(tree), *_hydra_faults(tree))]
        if problems:
            raise ConfigError(problems)
        if group in NAMED_AFTER_FILE and "defaults" in tree and "name" not in tree:
            tree["name"] = config_path.rpartition("/")[2]  # not the name of the file that it extends
        return ConfigResult(
            provider=self.provider, path=self.full_path(), config=tree, header=_header(file, key, group)
        )

    def _file(self, config_path: str) -> Path:
        return Path(self.path, f"{config_path.removesuffix(ENDING)}{ENDING}")


def _is_below(entry: Path, folder: Path) -> bool:
    """Return whether `entry` is a subfolder with config files, and not a link to a parent folder."""
    if not entry.is_dir() or entry.name == "__pycache__":
        return False
    return not folder.resolve().is_relative_to(entry.resolve())


def _header(file: Path, key: str, group: str) -> dict[str, str | None]:
    """Return the file's `# @package` header for Hydra; a preset's keys are always global."""
    try:
        header = ConfigSource._get_header_dict(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ConfigError(Problem(key, f"{file}: {error}. Write `# @package NAME`, or omit the line.")) from error
    if group == "recipe":
        if header["package"] not in (None, "_global_"):
            text = f"{file}: the keys of a preset are global. Remove `# @package {header['package']}`."
            raise ConfigError(Problem(key, text))
        header["package"] = "_global_"
    return header


def _defaults_faults(tree: DictConfig) -> Iterator[str]:
    """Yield malformed entries of a `defaults` list, which Hydra partly asserts on and partly ignores."""
    items = OmegaConf.to_container(tree, resolve=False)
    items = items.get("defaults", []) if isinstance(items, dict) else []
    if not isinstance(items, list):
        yield "`defaults` must be a list with lines like `- override /precision: mxfp8`."
        return
    for item in items:
        if isinstance(item, dict) and len(item) == 1:
            ((group, value),) = item.items()
            names = value if isinstance(value, list) else [] if value is None else [value]
            if "hydra/" in str(group):
                yield f"`defaults` chooses {group}: {hydra_setting(str(group).rpartition(' ')[2].lstrip('/'))}"
            elif not all(isinstance(each, str) for each in (group, *names)):
                yield f"`defaults` has `{group}: {value}`, which is not a file of a group."
        elif not isinstance(item, str):
            yield f"`defaults` has `{item}`. Write `- override /precision: mxfp8`, `- _self_`, or the name of a file."


def _hydra_faults(tree: DictConfig) -> Iterator[str]:
    """Yield each setting of Hydra that is not used here."""
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
