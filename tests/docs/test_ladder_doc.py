"""The pages on ladders: commands parse, tables match the data here, predictions grade as recorded."""

import re
import shlex
from pathlib import Path

import pytest

from lightning_llm.cli.command_line import _parser
from lightning_llm.ladder.predictions import grade, read_ledger, target_of
from lightning_llm.model.flops import count_parameters

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "howto" / "ladder.md", ROOT / "docs" / "reference" / "ladder_measured.md")
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
BLOCKS = [block.replace("\\\n", " ") for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)]
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "internals"))
    import ladder_tables

    return ladder_tables


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command):
    arguments = _parser().parse_args(shlex.split(command, comments=True)[1:])
    if getattr(arguments, "predict", None):
        target = target_of(arguments.predict)
        assert (target.name, target.parameters, target.tokens) == ("ladder_8m", 8_278_080, 131_072)


def test_recorded_predictions_grade_as_recorded(tables):
    ladder = tables.measured_ladder()
    ledger = read_ledger(tables.PREDICTIONS)  # which holds each to its hash
    assert sum(each.outcome is not None for each in ledger) >= 16
    for each in ledger:
        before, each.outcome = each.outcome, None
        assert grade(each, ladder) == (before is not None)
        if before is None:
            continue
        for key in ("gap", "z", "interval", "inside"):
            assert each.outcome[key] == pytest.approx(before[key])
        assert before["made_before_the_runs"] is True


def test_rungs_have_the_parameter_counts_of_their_configs(tables):
    from lightning_llm.config.compose import compose_config

    names = ("ladder_240k", "ladder_1m")
    sizes = [count_parameters(compose_config([f"model={name}", "data=python"]).model).total for name in names]
    assert set(sizes) <= {rung.parameters for rung in tables.measured_ladder().rungs}
