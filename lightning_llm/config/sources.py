"""`--config-dir DIR` as a source of config groups for Hydra: `DIR/recipe/mine.yaml` is `recipe=mine`.

Its YAML files are read here; its Python files are `config_dir`'s.

Hydra's own reader of files takes a list or an empty file for nothing said, a recipe without `# @package _global_` for
something to put below `recipe`, and passes on what the file system and YAML raise. This one says what is wrong.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, ListConfig, OmegaConf

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.config_hash import flatten
from lightning_llm.config.overrides import hydra_setting
from lightning_llm.config.yaml_file import read_mapping

SCHEME = "config-dir"
ENDING = ".yaml"
NAMED_AFTER_FILE = ("model", "data", "precision", "parallel", "trainer", "spikes", "cluster")
"""Groups with a free `name`; in the others it is the name of a kind."""


def search_override(folder: Path) -> str:
    """Return the override that has Hydra look for groups in `folder`, behind the shipped ones."""
    _register()
    where = QuotedString(f"{SCHEME}://{folder.absolute()}", Quote.single).with_quotes()
    return f"hydra.searchpath=[{where}]"


@cache
def _register() -> None:
    Plugins.instance().register(ConfigDirSource)


class ConfigDirSource(ConfigSource):
    """Reads groups below one folder; what is wrong with a file that is chosen is a `ConfigError`."""

    @staticmethod
    def scheme() -> str:
        """Return what stands before `://` in a search path."""
        return SCHEME

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
            if "hydra/" in str(group):
                yield f"`defaults` chooses {group}: {hydra_setting(str(group).rpartition(' ')[2].lstrip('/'))}"
            elif not isinstance(group, str) or not (
                value is None or isinstance(value, str) or (isinstance(value, list) and all(map(_is_text, value)))
            ):
                yield f"`defaults` has `{group}: {value}`, which names no file of a group."
        elif not isinstance(item, str):
            yield f"`defaults` has `{item}`. Write `- override /precision: mxfp8`, `- _self_`, or the name of a file."


def _is_text(value: object) -> bool:
    return isinstance(value, str)


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
