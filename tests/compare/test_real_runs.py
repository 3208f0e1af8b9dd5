"""The verdict over runs that were trained: a recipe against itself, and a broken one. 25 seconds; more in test-full."""

import json
import random
from pathlib import Path

import pytest

from lightning_llm.__main__ import main

pytestmark = pytest.mark.usefixtures("undrawn")

STEPS = 40
COMMON = [
    f"trainer.max_steps={STEPS}", "trainer.validate_every_steps=10", "optim.learning_rate=2e-2",
    "checkpoint.every_steps=null", "data.micro_batch_size=4",
    "schedule=wsd", "schedule.warmup_steps=5", "schedule.decay_fraction=0.5", "schedule.final_factor=0.0",
    "callbacks.throughput._target_=lightning_llm.callbacks.throughput.Throughput",
]  # fmt: skip
BROKEN = ["precision.name=crude", "precision.optimizer.eps=0.1"]
"""bf16 with an epsilon, one of a recipe's optimizer hints, that swallows the gradients."""


def write_documents(file: Path) -> Path:
    """Write 200 documents in which nine words of ten follow from the one before: there is a context to learn from."""
    generator, words = random.Random(0), [f"w{number}" for number in range(17)]
    with file.open("w") as out:
        for _ in range(200):
            word, said = 0, []
            for _ in range(generator.randint(60, 200)):
                word = (3 * word + 1) % 17 if generator.random() < 0.9 else generator.randrange(17)
                said.append(words[word])
            out.write(json.dumps({"text": " ".join(said)}) + "\n")
    return file


def train_all(folder: Path, small_run, seeds) -> Path:
    """Train bf16, bf16 with another micro-batch size, and the broken recipe at each seed; return the sweep's folder."""
    data = f"data.sources.jsonl.path={write_documents(folder / 'documents.jsonl')}"
    recipes = [["precision=bf16"], ["precision=bf16", "data.micro_batch_size=2"], ["precision=bf16", *BROKEN]]
    for number, (seed, words) in enumerate((seed, words) for seed in seeds for words in recipes):
        place = [f"seed={seed}", f"run.dir={folder / 'study' / str(number)}"]
        assert main(["train", *small_run(folder, *COMMON, data, *words, *place)]) == 0
    return folder / "study"


def judge(capsys, *words) -> dict:
    capsys.readouterr()
    assert main(["compare", "--json", *map(str, words)]) == 0
    found = json.loads(capsys.readouterr().out)
    return {**found, "by_name": {row["name"]: row for row in found["verdicts"]}}


def check(sweep: Path, capsys, seeds: int) -> None:
    found = judge(capsys, sweep)
    row = found["by_name"]["crude"]
    assert row["verdict"] == "lossy"
    assert (row["pairs"], row["controlled"]) == (seeds, True)
    (floor,) = found["aa"]
    assert (floor["pairs"], floor["keys"]) == (seeds, ["data.micro_batch_size"])
    assert 0 < floor["floor"] < row["gap"] / 3
    itself = judge(capsys, *(folder for folder in sweep.glob("[0-9]*") if int(folder.name) % 3 < 2))
    assert [each["name"] for each in itself["verdicts"]] == ["data.micro_batch_size=2"]
    assert itself["verdicts"][0]["verdict"] != "lossy"


@pytest.mark.full
def test_a_broken_recipe_is_lossy_and_a_recipe_is_not_lossy_against_itself(tmp_path, small_run, capsys):
    sweep = train_all(tmp_path, small_run, range(3))
    check(sweep, capsys, 3)
    summary = json.loads((sweep / "0" / "summary.json").read_text())
    assert summary["threads"] == 1
    assert summary["backend"] is None
    assert summary["parameters"] > 0
    assert all(len(summary[key]) >= 12 for key in ("data_hash", "validation_hash", "code_hash"))
    other = json.loads((sweep / "4" / "summary.json").read_text())
    assert [summary[key] for key in ("data_hash", "code_hash")] == [other[key] for key in ("data_hash", "code_hash")]


@pytest.mark.full
def test_over_more_seeds(tmp_path, small_run, capsys):
    check(train_all(tmp_path, small_run, range(5)), capsys, 5)
