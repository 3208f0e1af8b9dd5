"""The shipped recipes: where their files lie, what each is for, and how Hydra finds them as `recipe=NAME`.

The folder is plural and the Hydra group singular, so the files are put into Hydra's config store one by one.
"""

from collections.abc import Iterator
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

HEADER = "# @package _global_"


def recipe_files(config_dir: Path | None = None) -> Iterator[tuple[str, Traversable]]:
    """Yield (name, file) of every shipped recipe, `name` as in `recipe=NAME` ("quickstart", "sweep/aa_noise").

    Those of `config_dir`/recipe come behind.
    """
    yield from _yaml_files(resources.files("lightning_llm.recipes"), "")
    if config_dir is not None and (config_dir / "recipe").is_dir():
        yield from _yaml_files(config_dir / "recipe", "")


def describe(file: Traversable) -> str:
    """Return a recipe's one-line description: the comment on the line below its package header."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return lines[1].lstrip("# ").strip() if len(lines) > 1 and lines[1].startswith("#") else ""


@cache
def register_recipes() -> None:
    """Put every shipped recipe into Hydra's `recipe` group, once in a process."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    for name, file in recipe_files():
        text = file.read_text(encoding="utf-8")
        if not text.startswith(HEADER):
            raise ValueError(f"{file}: the first line of a recipe must be '{HEADER}'")
        parent, _, leaf = name.rpartition("/")
        ConfigStore.instance().store(
            group=f"recipe/{parent}" if parent else "recipe",
            name=leaf,
            node=OmegaConf.create(text),
            package="_global_",
            provider="lightning_llm.recipes",
        )


def _yaml_files(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.is_dir():
            yield from _yaml_files(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            yield prefix + entry.name.removesuffix(".yaml"), entry
