"""A truncated config.yaml of a run, which is still valid YAML."""

import re
from pathlib import Path

import pytest

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.from_file import load_config
from lightning_llm.tracking.reading import read_run
from tests.compare.run_folders import make_run


def test_a_truncated_config_is_reported_and_no_other_recipe(tmp_path: Path) -> None:
    file = make_run(tmp_path / "run") / "config.yaml"
    text = file.read_text()
    file.write_text(text[: text.index("\nseed:") + 1])
    with pytest.raises(ConfigError, match=r"config\.yaml has no .*seed: it was truncated or changed"):
        read_run(file.parent)
    file.write_text(text[: text.index("\nprecision:") + 1])
    with pytest.raises(ConfigError, match=re.escape(f"{file}: is damaged or from another version: schedule: a value")):
        load_config(file, ["trainer.devices=1"])
