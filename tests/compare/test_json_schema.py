"""`compare --json` of every kind of comparison against its published JSON Schema."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from lightning_llm.__main__ import main
from lightning_llm.compare.comparison import SCHEMA_VERSION
from lightning_llm.compare.format import json_ready
from lightning_llm.compare.json_schema import compare_schema
from lightning_llm.compare.judge import compare_runs
from lightning_llm.compare.looks import declare
from lightning_llm.compare.terms import Terms
from lightning_llm.tracking.reading import read_run
from tests.compare.run_folders import make_run, make_sweep, verdicts

pytestmark = pytest.mark.usefixtures("undrawn")

PUBLISHED = Path(__file__).resolve().parents[2] / "docs" / "reference" / "compare.schema.json"
VALIDATOR = jsonschema.Draft202012Validator(compare_schema())


def check(found: dict) -> dict:
    """Validate what `verdicts` returned, without the entries that the test helper added."""
    data = {key: value for key, value in found.items() if key not in ("by_name", "stderr")}
    errors = [f"{error.json_path}: {error.message[:200]}" for error in VALIDATOR.iter_errors(data)]
    assert not errors
    return found


def test_the_published_schema_is_the_programs(capsys):
    jsonschema.Draft202012Validator.check_schema(compare_schema())
    assert json.loads(PUBLISHED.read_text()) == compare_schema()
    assert main(["compare", "--json-schema"]) == 0
    assert json.loads(capsys.readouterr().out) == compare_schema()
    assert compare_schema()["properties"]["schema_version"]["const"] == SCHEMA_VERSION


def test_every_object_is_closed():
    """A field that nobody declared fails the tests of this file."""
    objects = [compare_schema(), *compare_schema()["$defs"].values()]
    assert all(each["additionalProperties"] is False for each in objects)
    assert all(set(each["required"]) == set(each["properties"]) for each in objects)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--require", "lossless"),
        ("--all-pairs", "--target", "4.4", "--confidence", "0.9"),
        ("--metric", "val_loss/code", "--tail", "0"),
    ],
    ids=str,
)
def test_comparisons_at_one_look(sweep, capsys, words):
    code = 1 if "--require" in words else 0
    check(verdicts(capsys, sweep, *words, expect=code))


def test_incomplete_comparisons(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp4_sr": 0.002})
    make_run(tmp_path / "s" / "9", "precision=mxfp8", "seed=0", summary={"status": "failed"})
    (sweep / "2" / "summary.json").unlink()
    assert check(verdicts(capsys, sweep, "--require", "lossless", expect=2))["problems"]


def test_each_arm_at_its_best_value(tmp_path, capsys):
    rates = ("1e-3", "2e-3", "4e-3")
    gaps = {
        f"precision={arm} optim.learning_rate={rate}": abs(place - 1) * 0.1
        for arm in ("bf16", "mxfp8")
        for place, rate in enumerate(rates)
    }
    found = check(verdicts(capsys, make_sweep(tmp_path / "s", gaps, 3), "--best-of", "optim.learning_rate"))
    assert found["selection"]["choices"]
    assert found["verdicts"][0]["tuned"]


def test_diverged_and_single_runs(tmp_path, capsys):
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0}, 2)
    make_run(
        sweep / "8", "precision=mxfp8", "seed=0", losses={5: 6.0, 10: float("nan")}, summary={"status": "diverged"}
    )
    found = check(verdicts(capsys, sweep))
    assert found["verdicts"][0]["gap"] is None


def test_declared_looks_margins_in_tokens_and_branches(tmp_path):
    """Over the runs themselves: commands that make such sweeps train."""
    sweep = make_sweep(tmp_path / "s", {"precision=bf16": 0.0, "precision=mxfp8": 0.001}, 3)
    runs = [read_run(each) for each in sorted(sweep.iterdir())]
    design = declare((2, 3), (0, 1, 2), Terms(), "linear", 1, None)
    found = json_ready(compare_runs(runs, Terms(), design=design).as_data())
    check(found)
    assert found["sequential"]
    assert found["verdicts"][0]["look"]
    tokens = [
        read_run(make_run(tmp_path / f"t{seed}{steps}", "precision=bf16", f"seed={seed}", steps=steps))
        for seed in range(3)
        for steps in (50, 200)
    ]
    priced = compare_runs([*runs, *tokens], replace(Terms(), margin=float("nan"), token_margin=0.05))
    check(json_ready(priced.as_data()))
    assert priced.verdicts[0].effective_data
