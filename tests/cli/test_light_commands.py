"""Imports of a new interpreter for help, lists and refusals: no torch, and not more than needed."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def command(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "lightning_llm", *words], capture_output=True, text=True, env=environment, cwd=cwd
    )


def test_the_command_line_reports_all_problems_and_exits_with_2_without_torch(tmp_path):
    done = command("train", "model.hiden_size=3", "trainer.max_steps=x", f"run.root={tmp_path}", cwd=tmp_path)
    assert done.returncode == 2
    assert "2 problems" in done.stderr
    assert "Did you mean 'hidden_size'?" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    code = (
        "import sys\nfrom lightning_llm.__main__ import main\n"
        f"main(['train', 'model.hiden_size=3', 'run.root={tmp_path}'])\n"
        "print(sorted({'torch', 'lightning', 'mlflow', 'datasets'} & set(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert loaded.stdout.strip() == "[]"


def test_help_and_recipes_import_neither_hydra_nor_torch():
    code = (
        "import sys\nfrom lightning_llm.__main__ import main\nmain(['recipes'])\n"
        "print(sorted({'hydra', 'torch', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "quickstart" in done.stdout
    helped = command("--help")
    assert helped.returncode == 0
    assert "exit codes" in helped.stdout
