"""The pages on comparisons agree with the program: commands, keys that are no confounders, the power table."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from lightning_llm.__main__ import main
from lightning_llm.cli.command_line import _parser
from lightning_llm.compare.runs.differences import FREE
from lightning_llm.compare.statistics.intervals import simultaneous_intervals
from lightning_llm.config.sweep_space import compose_sweep, read_sweep_keys

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "reference" / "compare.md").read_text(encoding="utf-8")
SEEDS = (DOCS / "howto" / "choose_seeds_and_margin.md").read_text(encoding="utf-8")
SEQUENTIAL = (DOCS / "howto" / "seeds_until_decided.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", REFERENCE + (DOCS / "howto" / "compare.md").read_text() + SEQUENTIAL, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse_and_sweeps_compose(command, monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path))
    arguments = _parser().parse_args(shlex.split(command, comments=True)[1:])
    if arguments.verb == "train":
        read_sweep_keys(arguments.overrides)
    if arguments.verb == "train" and "recipe=quickstart" in arguments.overrides:
        assert len(compose_sweep(arguments.overrides)) >= 6


def test_a_margin_in_tokens_can_be_declared_on_the_command_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path))
    (command,) = (each for each in COMMANDS if "sweep.margin=2% 'sweep.also=" in each)
    words = ["-m", "sweep.max_seeds=3", *shlex.split(command, comments=True)[3:]]  # the first look, and no more
    assert main(["plan", *words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["sequential"]["margin"] == "2%"
    assert f"({plan['sequential']['first_jobs']} jobs for the first look" in " ".join(SEQUENTIAL.split())
    own, given = "precision=bf16 data.micro_batch_size=4 seed=0,1,2", words[-1].partition("=")[2]
    rest = [word for word in words if not word.startswith("sweep.also")]
    assert main(["plan", *rest, f'sweep.also=["{own}"]']) == 2
    said = capsys.readouterr().err
    (also,) = shlex.split(said.partition("for all recipes, or ")[2].partition(" for the baseline")[0])
    assert json.loads(also.removeprefix("sweep.also=")) == [own, *json.loads(given)]
    assert main(["plan", *rest, also, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sequential"]["first_jobs"] == plan["sequential"]["first_jobs"] + 3
    assert f"at three lengths have {3 * len(plan['axes']['precision']) * 3})" in " ".join(SEQUENTIAL.split())


def test_the_reference_lists_every_key_that_is_no_confounder():
    named = set(re.findall(r"`([\w.*]+)`", REFERENCE))
    groups = {"model.name", "data.name", "parallel.name", "precision.name", "trainer.name"}
    descriptions = {"precision.reference", "precision.hardware", "model.parameters_published"}
    below = tuple(key for key in FREE if key.endswith("."))
    keys = {f"{key}*" if key in below else key for key in FREE if key in below or not key.startswith(below)}
    keys -= groups | descriptions
    assert keys <= named


@pytest.mark.parametrize(("recipes", "trials"), [(1, 20_000), (4, 10_000)])
def test_a_cell_of_the_power_table_agrees_with_simulation(recipes, trials):
    row = next(line for line in SEEDS.splitlines() if line.startswith(f"| 0.005 | {recipes} |"))
    lossless, lossy = (int(each) for each in row.split("|")[4].split("/"))  # 3 seeds
    losses = np.random.default_rng(0).normal(0, 0.005 / 2**0.5, (trials, recipes + 1, 3))
    found = simultaneous_intervals(losses[:, 1:] - losses[:, :1])
    assert 100 * (found.high < 0.01).mean() == pytest.approx(lossless, abs=1.5)
    assert 100 * (found.low + 0.03 > 0.01).mean() == pytest.approx(lossy, abs=1.5)


def test_the_readmes_picture_shows_its_table_and_is_made_by_its_command():
    spec = importlib.util.spec_from_file_location("draw_compare", DOCS / "internals" / "draw_compare.py")
    draw_compare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw_compare)
    found = json.loads((DOCS / "internals" / "compare.json").read_text(encoding="utf-8"))
    table = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    drawn = [each.replace("−", "-") for each in re.findall(r"<!-- (.*?) -->", draw_compare.draw(found))]
    committed = [
        each.replace("−", "-")
        for each in re.findall(r"<!-- (.*?) -->", (DOCS / "pictures" / "compare.svg").read_text())
    ]
    assert drawn == committed  # matplotlib's texts; outlines depend on its version
    for row in found["verdicts"]:
        interval = f"[{row['ci'][0]:+.4f}, {row['ci'][1]:+.4f}]"
        line = re.search(rf"^{row['name']} +(.*?) +([+-]\S+) (\[.*?\])", table, re.MULTILINE)
        assert line.groups() == (row["qualified"], f"{row['gap']:+.4f}", interval)
        assert f"{row['gap']:+.4f} {interval}" in committed
