"""Pages about watching a run: their commands compose; the page on spikes has every event, policy and threshold."""

import re
import shlex
from pathlib import Path
from typing import get_args

import pytest

from lightning_llm.cli.command_line import _parser
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import SpikesConfig
from lightning_llm.plan.check import check_config
from lightning_llm.train.spikes import Kind

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
SPIKES, *OTHERS = ((HOWTO / f"{name}.md").read_text(encoding="utf-8") for name in ("spikes", "monitor", "stragglers"))
ALL = "\n".join([SPIKES, *OTHERS])


@pytest.mark.parametrize("command", re.findall(r"^lightning-llm (.*)", ALL.replace("\\\n", " "), re.MULTILINE))
def test_commands_compose(command, monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path))
    check_config(compose_config(_parser().parse_args(shlex.split(command)).overrides))


def test_the_page_on_spikes_names_every_event_policy_and_threshold():
    rows = re.findall(r"^\| `(\w+)`", SPIKES, re.MULTILINE)
    assert set(get_args(Kind)) | set(get_args(SpikesConfig.model_fields["policy"].annotation)) <= set(rows)
    config = SpikesConfig()
    assert f"last {config.level_steps} steps" in SPIKES
    assert f"{config.loss_threshold:g} ({config.grad_norm_threshold:g}) sigmas" in SPIKES
    assert f"last {config.window_steps} steps" in SPIKES
