"""The mixer of tests/examples, installed as a package, is planned, built and trained; typos are reported."""

import json
import os
import subprocess
import sys

import pytest

from tests.docs.installed_package import EXAMPLES, lay_examples

SCRIPT = """
import sys
from pathlib import Path

import torch
from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.flops import count_parameters

*words, option, folder = sys.argv[1:]
words += [option, folder]
codes = [main(["plan", "--json", *words]), main(["train", *words])]
codes += [main(["train", *words, "+model.blocks.slow.mixer.decai=0.5"])]
config = compose_config(words[:-2], Path(folder)).model
model = Decoder(config)
print("codes", codes)
print("counts", count_parameters(config, padded=True).total, sum(each.numel() for each in model.parameters()))
print("kinds", [type(block.attention).__name__ for block in model.layers.values()])
first, ids = model(torch.arange(8)[None]), torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]])
print("apart", torch.equal(model(torch.arange(8)[None], document_ids=ids)[:, :4], first[:, :4]))
"""


@pytest.fixture
def installed(tmp_path):
    """Lay the examples where Python finds them; return their folder."""
    lay_examples(tmp_path)
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "average_tiny.yaml").write_text((EXAMPLES / "average_tiny.yaml").read_text())
    return tmp_path


@pytest.mark.full
def test_the_examples_mixer_trains_from_an_installed_package(installed, small_run):
    words = small_run(installed, "data.document_mask=true", "model.num_layers=3", "trainer.max_steps=4")
    words[words.index("model=llama_tiny")] = "model=average_tiny"
    words += ["--config-dir", str(installed / "mine")]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "codes [0, 0, 2]" in done.stdout, done.stderr
    assert "error: 1 problem with the config" in done.stderr
    assert "decai: unknown key. Did you mean 'decay'" in done.stderr
    lines = dict(
        line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("counts", "kinds", "apart"))
    )
    planned, built = map(int, lines["counts"].split())
    assert planned == built
    assert lines["kinds"] == "['AverageModule', 'AverageModule', 'Attention']"
    assert lines["apart"] == "True"
    records = [json.loads(line) for line in (installed / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "grad_norm" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert steps[-1]["loss"] < steps[0]["loss"]
