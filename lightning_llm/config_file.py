"""`config.yaml`: how a resolved config is kept."""

from pathlib import Path

import yaml

from lightning_llm.schema import Config


def config_text(config: Config) -> str:
    """Return `config` as YAML that `train --config FILE` takes."""
    return yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)


def write_config(config: Config, file: Path) -> None:
    """Write `config` so that `train --config FILE` repeats the run; the file appears whole."""
    partial = file.with_suffix(".partial")
    partial.write_text(config_text(config), encoding="utf-8")
    partial.rename(file)
