"""`ladder`, its --predict and --grade, and `compare --margin 2%` over folders as runs leave them."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from lightning_llm.__main__ import main
from lightning_llm.cli import ladder as command
from tests.compare import run_folders
from tests.compare.run_folders import STEP_TOKENS, make_run, refusal, verdicts

pytestmark = pytest.mark.usefixtures("undrawn")
SIZES = {"ladder_240k": 237_888, "ladder_690k": 688_768, "ladder_1m": 1_115_264}
STEPS = (4, 8, 16)
TOP = ("llama_tiny", 2_164_416)


def loss(parameters, tokens):
    return 1.5 + 60 * parameters**-0.3 + 110 * tokens**-0.45


def compose_once(model: str) -> None:
    """Let `make_run` find the configs of this model: each composed anew would take a quarter of a second."""
    shape = yaml.safe_load((Path(__file__).parents[2] / "conf" / "model" / f"{model}.yaml").read_text())
    for recipe in ("precision=bf16", "precision=mxfp4_sr"):
        config = run_folders.config_of(recipe)
        run_folders._composed[f"model={model}", recipe] = {**config, "model": {**config["model"], **shape}}


def add_rung(folder: Path, model: str, parameters: int, steps: int, started: str, rng, seeds: int = 1) -> None:
    tokens = steps * STEP_TOKENS
    compose_once(model)
    for seed in range(seeds):
        base = loss(parameters, tokens) + rng.normal(0, 0.004)
        for recipe, cost in (("bf16", 0.0), ("mxfp4_sr", 0.03)):
            value = base + cost * 110 * tokens**-0.45 + (rng.normal(0, 0.001) if cost else 0)
            words = (f"model={model}", f"precision={recipe}", f"seed={seed}")
            make_run(
                folder / f"{model}-{recipe}-{steps}-{seed}", *words, steps=steps,
                losses={steps // 2: value + 0.5, steps: value}, summary={"started_at": started},
            )  # fmt: skip


@pytest.fixture(scope="module")
def ladder(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("outputs") / "ladder", np.random.default_rng(0)
    for model, parameters in SIZES.items():
        for steps in STEPS:
            seeds = 2 if model == "ladder_690k" else 1
            add_rung(folder, model, parameters, steps, "2026-11-21T10:00:00+00:00", rng, seeds)
    return folder


def ask(capsys, *words, expect=0) -> dict:
    assert main(["ladder", *map(str, words), "--json"]) == expect
    out, err = capsys.readouterr()
    return {**json.loads(out), "stderr": err}


def test_predicted_before_it_was_run_and_graded_after(ladder, capsys):
    target = ("--predict", f"model={TOP[0]}", f"data.tokens={16 * STEP_TOKENS}")
    found = ask(capsys, ladder, *target)
    (said,) = found["predictions"]
    assert (said["claim"]["recipe"], said["claim"]["parameters"], said["outcome"]) == ("mxfp4_sr", TOP[1], None)
    assert said["claim"]["line"].startswith("mxfp4_sr: ")
    assert "more tokens [" in said["claim"]["line"]
    assert "at 2.16M / 32.8K (llama_tiny), not shown to grow with tokens per parameter (p = " in said["claim"]["line"]
    truth = 1.03 ** (1 / 0.45) - 1
    low, high = said["claim"]["more_tokens_interval"]
    assert low < truth < high
    assert [row["name"] for row in found["recipes"]] == ["mxfp4_sr"]
    assert len(found["runs"]) == 3 * (2 + 4 + 2)

    again = ask(capsys, ladder, *target)
    assert again["predictions"] == [said]  # the earlier date holds

    add_rung(ladder, *TOP, 16, "2999-01-01T00:00:00+00:00", np.random.default_rng(1))
    graded = ask(capsys, ladder, "--grade")
    (line,) = graded["ledger"]
    assert (line["hash"], line["claim"]) == (said["hash"], said["claim"])
    assert (line["outcome"]["inside"], line["outcome"]["made_before_the_runs"]) == (True, True)
    assert graded["tally"] == "1 of 1 graded predictions held at 95 %; 0 not run yet"
    assert ask(capsys, ladder, "--grade")["ledger"] == [line]
    late = refusal(capsys, ladder, *target, verb="ladder")
    assert "its runs at that size and number of tokens exist already" in late


def test_a_prediction_beyond_the_limit_is_refused_and_not_recorded(ladder, capsys):
    ledger = ladder.parent / "other.jsonl"
    said = refusal(capsys, ladder, "--predict", "model=llama_1b", "data.tokens=20e9", "--ledger", ledger, verb="ladder")
    assert "no prediction at 1.24B / 20B" in said
    assert "decades beyond the ladder" in said
    assert "--beyond DECADES raises the limit" in said
    assert not ledger.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--predict", "data.tokens=1e6"), "has no model"),
        (("--predict", "model=llama_1b", "data.tokens=many"), "data.tokens=many is not a number of tokens"),
        (("--predict", "model=llama_1b", "steps=3", "data.tokens=1e6"), "'steps=3' is neither a model"),
        (("--ladder", "--beyond", "0"), "--beyond=0: must be above 0"),
        (("--margin", "2 percent"), "--margin=2 percent: must be above 0"),
        (("--margin", "80%"), "at most 50%"),
    ],
)
def test_invalid_targets_are_refused(words, said, ladder, capsys):
    assert said in refusal(capsys, ladder, *words)


@pytest.mark.full
def test_flags_of_earlier_releases_run_the_verb(ladder, capsys):
    found = ask(capsys, ladder)
    assert found["stderr"] == ""
    assert main(["compare", str(ladder), "--ladder", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {key: value for key, value in found.items() if key != "stderr"}
    assert err.splitlines() == [
        "note   compare --ladder, --predict and --grade: deprecated, use `lightning-llm ladder` instead"
    ]


def test_a_ladder_needs_rungs(ladder, capsys):
    some = [folder for folder in sorted(ladder.iterdir()) if folder.name.startswith("ladder_240k")]
    said = refusal(capsys, *some, verb="ladder")
    assert "These runs have 1 model size (238K), 3 token counts (8.19K, 16.4K, 32.8K) and 3 rungs. Missing: " in said
    assert "Missing: 2 model sizes, 5 rungs. Add sizes (model=A,B,C)" in said
    assert said.count("there is no ladder to fit") == 1


@pytest.fixture(autouse=True)
def unwritten(monkeypatch):
    """Leave the report out, which test_ladder_report.py looks at."""
    monkeypatch.setattr(command, "_write", lambda *_, **__: [])


def test_a_margin_in_tokens_is_the_baselines_loss_increase(ladder, capsys, tmp_path):
    runs = [folder for folder in sorted(ladder.iterdir()) if folder.name.startswith("ladder_690k")]
    runs = [folder for folder in runs if "bf16" in folder.name or "-8-" in folder.name]
    tokens = 8 * STEP_TOKENS
    truth = 1.03 ** (1 / 0.45) - 1  # 6.8 %
    for margin, decided in (("3%", "lossy"), ("12%", "lossless")):
        row = verdicts(capsys, *runs, "--margin", margin, "--output", tmp_path)["by_name"]["mxfp4_sr"]
        share = float(margin[:-1]) / 100
        nats = loss(688_768, tokens / (1 + share)) - loss(688_768, tokens)
        assert (row["verdict"], row["token_margin"]) == (decided, share)
        assert row["margin"] == pytest.approx(nats, rel=0.15)
        assert row["effective_data"]["more_tokens"] == pytest.approx(truth, rel=0.15)
        low, high = row["effective_data"]["more_tokens_ci"]
        assert low < truth < high
        assert row["net_speed"] is None  # an emulation's speed is none of the format's
        assert f"at margin {margin[:-1]} % of tokens" in row["line"]
        assert "% more tokens [" in row["line"]


def test_a_margin_in_tokens_names_the_runs_that_it_needs(ladder, capsys, tmp_path):
    alone = [
        folder for folder in sorted(ladder.iterdir()) if folder.name.startswith("ladder_690k") and "-8-" in folder.name
    ]
    said = refusal(capsys, *alone, "--margin", "2%", "--output", tmp_path)
    assert "needs the baseline at two other numbers of tokens" in said
    assert "Add 4 and 16 to the sweep (trainer.max_steps), at seeds 0, 1" in said
    assert "trainer.max_steps=16 run.name=NEW" in said
