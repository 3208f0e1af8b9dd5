"""docs/monitoring.md: its commands compose, its links exist, and it has every event, policy and figure."""

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from lightning_llm.cli.command_line import _parser
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import SpikesConfig
from lightning_llm.plan.check import check_config
from lightning_llm.train.spikes.detector import Kind

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", re.findall(r"^lightning-llm (.*)", TEXT.replace("\\\n", " "), re.MULTILINE))
def test_commands_compose(command, monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path))
    check_config(compose_config(_parser().parse_args(shlex.split(command)).overrides))


def test_it_names_what_there_is():
    rows = re.findall(r"^\| `(\w+)`", TEXT, re.MULTILINE)
    assert set(get_args(Kind)) | set(get_args(SpikesConfig.model_fields["policy"].annotation)) <= set(rows)
    for link in re.findall(r"\]\(([^)]+)\)", TEXT):
        assert (ROOT / "docs" / link.partition("#")[0]).exists()
    config = SpikesConfig()
    assert f"last {config.level_steps} steps" in TEXT
    assert f"{config.loss_threshold:g} ({config.grad_norm_threshold:g}) sigmas" in TEXT
    assert f"last {config.window_steps} steps" in TEXT
