"""The kinds of docs/howto/extend.md and tests/examples, installed, plan, train and resume; typos are reported."""

import csv
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.docs.installed_package import DOCS, EXAMPLES, lay_examples, lay_package
from tests.run_metrics import read_tensors

SCRIPT = """
import sys
from lightning_llm.__main__ import main

folder, *words = sys.argv[1:]
there = ["train", *words, f"run.dir={folder}/whole"]
codes = [main(["plan", "--json", *words])]
print("torch imported to plan:", "torch" in sys.modules)
codes += [main(["train", *words, "trainer.max_steps=3"])]
codes += [main(["train", *words, "resume=auto"]), main(there), main(["train", *words, "+optim.beta22=0.5"])]
codes += [main(["plan", *words, "schedule=wsd_sqrt"])]
print("codes", codes)
"""
KINDS = [
    "schedule.name=wsd_sqrt", "schedule.warmup_steps=2", "schedule.total_steps=6", "schedule.decay_fraction=0.5",
    "+data.mixture={kind: turns}", "model.activation=relu2", "model.norm=layernorm_no_bias",
    "algorithm={name: lookahead, every: 2, rate: 0.25}",
]  # fmt: skip


@pytest.fixture
def installed(tmp_path):
    """Lay the examples and then the document's package where Python finds them; return their folder."""
    lay_examples(tmp_path)
    assert lay_package("howto/extend.md", tmp_path) == {"pyproject.toml", "lion.py", "mine/optim/lion.yaml"}
    return tmp_path


def test_the_document_shows_one_tested_example_and_links_to_the_others(tmp_path):
    modules = lay_examples(tmp_path)
    lay_package("howto/extend.md", tmp_path)
    assert (tmp_path / "lion.py").read_text() == (EXAMPLES / "lion.py").read_text()
    linked = set(re.findall(r"tests/examples/(\w+)\.py\)", (DOCS / "howto" / "extend.md").read_text()))
    assert linked | {"lion"} == modules


def steps_in(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timeless = [{key: value for key, value in record.items() if key != "time"} for record in records]
    return [record for record in timeless if "grad_norm" in record], timeless


@pytest.mark.full
def test_the_documents_kinds_train_from_an_installed_package(installed, small_run):
    rows = [{"n": str(i), "body": " ".join(f"word{i * j % 7}" for j in range(80))} for i in range(30)]
    with (installed / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["n", "body"])
        writer.writeheader()
        writer.writerows(rows)
    table = f"+data.sources.table={{loader: csv, path: {installed / 'table.csv'}, column: body}}"
    words = small_run(installed, "optim=lion", "--config-dir", str(installed / "mine"), *KINDS, table)
    command = [sys.executable, "-c", SCRIPT, str(installed), *words]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "codes [0, 0, 0, 0, 2, 2]" in done.stdout, done.stderr
    assert "torch imported to plan: False" in done.stdout
    assert "optim.beta22: unknown key. Did you mean 'beta2'" in done.stderr
    assert "schedule: there is no 'wsd_sqrt'. The schedule of that name has no file." in done.stderr
    assert done.stdout.count("jsonl 50.0% = ") == 3
    assert done.stdout.count("table 50.0% = ") == 3
    plan = json.loads(done.stdout[done.stdout.index("{") : done.stdout.index("\n}\n") + 2])
    memory = plan["memory_bytes"]
    assert memory["optimizer"] == 2 * memory["parameters"] > 0  # Lion's momentum, Lookahead's slow weights
    assert plan["phases"] == [
        {"name": "turns", "first_step": 0, "last_step": 6, "drawn_tokens": {"jsonl": 12 * 32, "table": 12 * 32}}
    ]
    steps, records = steps_in(installed / "run")
    assert steps == steps_in(installed / "whole")[0]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [record["lr"] for record in steps] == pytest.approx(
        [3e-4 * factor for factor in (0.5, 1, 1, *(1 - 0.9 * (step / 3) ** 0.5 for step in (1, 2, 3)))]
    )
    assert "val_loss/table" in records[-1]
    resumed, whole = (read_tensors(installed / folder / "checkpoints" / "step=6") for folder in ("run", "whole"))
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    names = {name.removeprefix("model.") for name in whole if name.startswith("model.")}
    assert {name.rpartition(".")[2] for name in names if "norm" in name} == {"weight"}
    assert {name for name in whole if name.startswith("algorithm.")} == {f"algorithm.slow.{name}" for name in names}
    assert all(torch.equal(whole[f"model.{name}"], whole[f"algorithm.slow.{name}"]) for name in names)  # of step 6
