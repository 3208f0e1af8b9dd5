"""The pages on probe: commands parse, and every figure that the program writes is explained."""

import re
import shlex
from pathlib import Path

import pytest

from lightning_llm.callbacks.quantisation_health import COLUMNS
from lightning_llm.cli.command_line import _parse
from lightning_llm.config.compose import compose_config
from lightning_llm.probe.figures import compare, figures

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = DOCS / "howto" / "probe.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
FIGURES = (DOCS / "reference" / "probe_figures.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if line.startswith("lightning-llm ")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command):
    arguments = _parse(shlex.split(command, comments=True)[1:])
    if arguments.verb == "train" and arguments.config_dir is None:
        compose_config(arguments.overrides)


def test_the_page_shows_train_and_probe():
    assert {command.split()[1] for command in COMMANDS} >= {"train", "probe"}


def test_every_figure_is_explained():
    import torch

    names = set(figures(compare(torch.ones(3), [torch.zeros(3), torch.rand(3)])))
    assert [name for name in names if f"`{name}`" not in FIGURES] == []
    assert [name for name in COLUMNS if f"`{name}`" not in FIGURES] == []


def test_pictures_exist():
    for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", TEXT):
        assert (DOCUMENT.parent / path).is_file()
