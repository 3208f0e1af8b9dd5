"""`config.yaml`: how a resolved config is kept."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from lightning_llm.config.schema import Config

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's where PyYAML was built with it: four times as fast, the same text but where it folds a long quoted one."""

INTERPOLATION = re.compile(r"(\\*)\$\{")
"""The start of an interpolation of OmegaConf, and the backslashes before it."""


def config_text(config: Config) -> str:
    """Return `config` as YAML that `train --config FILE` takes."""
    return str(yaml.dump(literal(config.model_dump()), Dumper=_DUMPER, sort_keys=False, allow_unicode=True))


def literal(value: Any) -> Any:
    """Return `value` with "${" in its texts escaped, so that a tree of OmegaConf resolves them to these texts."""
    if isinstance(value, str):
        return INTERPOLATION.sub(lambda found: f"{found[1] * 2}\\${{", value)
    if isinstance(value, dict):
        return {key: literal(each) for key, each in value.items()}
    return [literal(each) for each in value] if isinstance(value, list | tuple) else value


def without_escapes(value: Any) -> Any:
    """Return `value`, read from a config.yaml as plain YAML, with its texts as they were in the config."""
    if isinstance(value, str):
        return INTERPOLATION.sub(lambda found: f"{found[1][: len(found[1]) // 2]}${{", value)
    if isinstance(value, dict):
        return {key: without_escapes(each) for key, each in value.items()}
    return [without_escapes(each) for each in value] if isinstance(value, list) else value


def write_config(config: Config, file: Path) -> None:
    """Write `config` so that `train --config FILE` repeats the run; the file appears whole."""
    partial = file.with_suffix(".partial")
    partial.write_text(config_text(config), encoding="utf-8")
    partial.rename(file)


@contextmanager
def in_memory(config: Config) -> Iterator[Path]:
    """Yield a file with `config` for this process's children to read; it is gone with this process, however that ends.

    It lies in memory (memfd_create(2)) and has no name but the one under /proc.
    """
    with os.fdopen(os.memfd_create("config.yaml"), "wb") as file:
        file.write(config_text(config).encode())
        file.flush()
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
