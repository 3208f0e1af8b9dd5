"""A student under data-parallel layouts: the bits of one rank, the divergence from its teachers among them."""

import json
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from tests.parallel.traced_run import difference, unsaved_run


def divergences(config) -> list[float]:
    lines = Path(config.run.dir, "metrics.jsonl").read_text().splitlines()
    return [record["distil_kl"] for record in map(json.loads, lines) if "distil_kl" in record]


@pytest.fixture(scope="module")
def teacher(small_run, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("teacher")
    words = small_run(folder, "model.hidden_size=64", "model.num_heads=1", "trainer.max_steps=2", "seed=9")
    assert main(["train", *words]) == 0
    return f"distil.teachers=[{folder / 'run'}]"


@pytest.mark.full
@pytest.mark.parametrize("layout", ["zero3", "ddp"])
def test_a_student_has_the_bits_of_one_rank(layout, teacher, ranks, matrix_run):
    words = "bf16", teacher, "distil.weight=0.5"
    one, two = matrix_run("single", 1, 4, *words), matrix_run(layout, 2, 4, *words)
    assert difference(ranks(1).call(unsaved_run, one), ranks(2).call(unsaved_run, two)) is None
    assert divergences(one) == divergences(two)
    assert len(divergences(one)) == 6
