"""docs/extend.md: its optimizer, installed as a package, is planned, trained and resumed, and its typos are told."""

import json
import os
import subprocess
import sys

import pytest
from installed_package import lay_package

SCRIPT = """
import sys
from lightning_llm.__main__ import main

words = sys.argv[1:]
codes = [main(["plan", "--json", *words]), main(["train", *words, "trainer.max_steps=2"])]
codes += [main(["train", *words, "resume=auto"]), main(["train", *words, "+optim.beta22=0.5"])]
print("codes", codes)
"""


@pytest.fixture
def installed(tmp_path):
    """Lay the document's package where Python finds it; return its folder."""
    files = lay_package("extend.md", tmp_path)
    assert files == {"lion_kind.py", "lion_step.py", "pyproject.toml", "mine/optim/lion.yaml"}
    return tmp_path


def test_the_documents_optimizer_trains_from_an_installed_package(installed, small_run):
    words = small_run(installed, "optim=lion", "--config-dir", str(installed / "mine"), "schedule.total_steps=4")
    words = [*words, "trainer.max_steps=4"]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", SCRIPT, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert "codes [0, 0, 0, 2]" in done.stdout, done.stderr
    assert "optim.beta22: unknown key. Did you mean 'beta2'" in done.stderr
    plan = json.loads(done.stdout[done.stdout.index("{") : done.stdout.index("\n}\n") + 2])
    memory = plan["memory_bytes"]
    assert memory["optimizer"] == memory["parameters"] > 0
    records = [json.loads(line) for line in (installed / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "grad_norm" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert steps[-1]["loss"] < steps[0]["loss"]
