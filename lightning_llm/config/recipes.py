"""Files of the config groups and presets, shipped or in `--config-dir`, and their descriptions."""

import re
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from lightning_llm.base.errors import Problem

ENDING = ".yaml"
OTHER_ENDING = ".yml"
"""Hydra does not read this suffix."""


def group_names() -> list[str]:
    """Return the names of all config groups, `recipe` last."""
    shipped = resources.files("lightning_llm.conf")
    return [*sorted(each.name for each in shipped.iterdir() if each.is_dir() and each.name[0] != "_"), "recipe"]


def option_files(group: str, config_dir: Path | None = None) -> dict[str, Traversable]:
    """Return {name: file} of the files that `group=NAME` can select, shipped ones first, then those of `config_dir`.

    A file in a subfolder has the name "FOLDER/NAME".
    """
    if group == "recipe":
        shipped = resources.files("lightning_llm.recipes")
    else:
        shipped = resources.files("lightning_llm.conf") / group
    found = dict(_yaml_files(shipped, ""))
    if config_dir is not None and (config_dir / group).is_dir():
        found |= dict(_yaml_files(config_dir / group, ""))
    return found


def recipe_files(config_dir: Path | None = None) -> Iterator[tuple[str, Traversable]]:
    """Yield (name, file) of every shipped preset, with `name` as in `recipe=NAME` ("quickstart", "sweep/aa_noise").

    Presets in `config_dir`/recipe are last.
    """
    yield from option_files("recipe", config_dir).items()


def describe(file: Traversable) -> str:
    """Return the description of a config file: the first sentence of its leading comment, "" without one."""
    if not file.is_file():
        return ""
    lines: list[str] = []
    for line in file.read_bytes().decode("utf-8-sig", "replace").splitlines():
        if not line.startswith("#"):
            break
        if not line.lstrip("# ").startswith("@"):
            lines.append(line.lstrip("# ").strip())
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join(lines), maxsplit=1)[0]


def folder_problems(config_dir: Path) -> list[Problem]:
    """Return problems of `config_dir`: it is a group's folder, or has files with other suffixes or shipped names."""
    key, groups = "--config-dir", group_names()
    if not any((config_dir / group).is_dir() for group in groups):
        inside = config_dir.absolute().name
        if inside in groups:
            text = f"is {config_dir}, the folder of a group. Give its parent: --config-dir {config_dir.parent}."
            return [Problem(key, text)]
        if loose := [each for each in sorted(config_dir.iterdir()) if each.suffix in (ENDING, OTHER_ENDING)]:
            text = f"{loose[0]} is not in a group's folder. Move it, e.g. to {config_dir / 'recipe' / loose[0].name}."
            return [Problem(key, text)]
    shipped = [f"{group}/{name}" for group in groups for name in option_files(group)]
    clashes = [
        Problem(key, f"{file} has the name of a shipped file, which would be used instead. Rename it.")
        for file in (config_dir / f"{name}{ENDING}" for name in ("config", *shipped))
        if file.is_file()
    ]
    others = [each for group in groups for each in sorted((config_dir / group).rglob(f"*{OTHER_ENDING}"))]
    unread = [Problem(key, f"{each} is not read. Rename it to {each.with_suffix(ENDING).name}.") for each in others]
    return [*clashes, *unread]


def _yaml_files(
    folder: Traversable, prefix: str, above: frozenset[Path] = frozenset()
) -> Iterator[tuple[str, Traversable]]:
    if isinstance(folder, Path):  # a link to a parent folder would be a cycle
        if folder.resolve() in above:
            return
        above |= {folder.resolve()}
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.name.endswith(ENDING):
            yield prefix + entry.name.removesuffix(ENDING), entry
        elif entry.is_dir():
            yield from _yaml_files(entry, f"{prefix}{entry.name}/", above)
