"""docs/extend.md: its optimizer, installed as a package, is planned, trained and resumed, and its typos are told."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"^```\w+\n# (\S+)\n(.*?)^```", (ROOT / "docs" / "extend.md").read_text(), re.DOTALL | re.MULTILINE)
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
    """Lay the document's package where Python finds it, as pip does, with its entry point; return its folder."""
    files = dict(BLOCKS)
    assert files.keys() == {"lion_kind.py", "lion_step.py", "pyproject.toml", "mine/optim/lion.yaml"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    project = tomllib.loads(files["pyproject.toml"])["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("".join(lines))
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
