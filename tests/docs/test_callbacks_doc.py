"""docs/howto/callbacks.md: its example runs unchanged, and its commands compose."""

import re
import shlex
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from tests.run_metrics import read_metrics

TEXT = (Path(__file__).parents[2] / "docs" / "howto" / "callbacks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
COMMANDS = [line for language, block in BLOCKS if language == "sh" for line in block.splitlines()]


def test_the_example_runs_and_its_state_comes_back(tmp_path, small_run):
    python, yaml = ([block for language, block in BLOCKS if language == each] for each in ("python", "yaml"))
    folder = tmp_path / "DIR" / "callbacks"
    folder.mkdir(parents=True)
    (folder / "loss_ratio.py").write_text(python[0])
    (folder / "mine.yaml").write_text(yaml[0])
    words = [word for word in small_run(tmp_path, "~callbacks.sample") if not word.startswith("callbacks=")]
    words += ["callbacks=mine", "--config-dir", str(tmp_path / "DIR")]
    for steps in (2, 4):
        assert main(["train", *words, f"trainer.max_steps={steps}", "resume=auto"]) == 0
    steps = [each for each in read_metrics(tmp_path / "run") if "loss" in each]
    ratios = [each["loss"] / steps[0]["loss"] for each in steps]
    assert [each["loss_ratio"] for each in steps] == pytest.approx(ratios, rel=1e-7)  # self.log keeps fp32


@pytest.mark.parametrize("command", [each for each in COMMANDS if "DIR" not in each])
def test_commands_compose(command):
    program, verb, *words = shlex.split(command)
    assert (program, verb) == ("lightning-llm", "train")
    compose_config(words)
