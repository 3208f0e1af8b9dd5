"""The scripts in examples/ run, with few steps, and answer their questions."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_llm.__main__ import main
from tests.compare.curves.test_program_logs import ARGUMENTS, megatron

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """Return a function that runs a script in this process, in `tmp_path`, and returns its exit code."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, *words: str) -> int:
        monkeypatch.setattr(sys, "argv", [name, *words])
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return run


def losses(arm: str, seed: int, gap: float = 0.0, steps: int = 200) -> list[float]:
    """Return the losses of one run: noise that both arms share, noise of the arm, and a gap that grows to `gap`."""
    data, own = np.random.default_rng(seed), np.random.default_rng([seed, len(arm)])
    step = np.arange(1, steps + 1)
    curve = 3 + 6 * np.exp(-step / 40) + gap * step / steps
    return list(curve + data.normal(0, 0.03, steps) + own.normal(0, 0.002, steps))


def test_the_readme_lists_every_script():
    text = (EXAMPLES / "README.md").read_text()
    assert all(f"({name})" in text for name in SCRIPTS)
    assert len(SCRIPTS) == 5


def test_two_megatron_logs_get_their_differences_and_a_verdict(script, tmp_path: Path, capsys):
    for name, gap, arguments in (
        ("old.log", 0.0, ARGUMENTS),
        ("newer.log", 0.5, ARGUMENTS + "  fp8 ........ hybrid\n"),
    ):
        lines = [megatron(step, loss) for step, loss in enumerate(losses(name, 0, gap), 1)]
        (tmp_path / name).write_text(
            arguments.replace("log_interval .................................... 10", "") + "".join(lines)
        )
    assert script("megatron_logs.py", "old.log", "newer.log") == 0
    printed = capsys.readouterr().out
    assert "fp8: not given -> hybrid" in printed
    assert "lm loss: equal until step 1, then" in printed
    assert "inconclusive" in printed  # one pair


@pytest.mark.parametrize(("gap", "code"), [(0.0, 0), (0.5, 1)], ids=["same", "worse"])
def test_the_gate_passes_the_exit_code_of_compare_on(gap: float, code: int, tmp_path: Path, capsys):
    """The script runs with a stand-in for `lightning-llm` that records its words; these then run in this process."""
    for arm, added in (("main", 0.0), ("change", gap)):
        for seed in range(4):
            rows = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses(arm, seed, added), 1)]
            (tmp_path / f"{arm}-{seed}.jsonl").write_text("\n".join(rows) + "\n")
    stand_in = tmp_path / "bin" / "lightning-llm"
    stand_in.parent.mkdir()
    stand_in.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\nexit {code}\n')
    stand_in.chmod(0o755)
    path = f"{stand_in.parent}:{os.environ['PATH']}"
    ended = subprocess.run(
        [str(EXAMPLES / "gate_in_ci.sh"), str(tmp_path)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == code
    assert ("gate: passed" if code == 0 else "gate: failed") in ended.stdout
    assert main((tmp_path / "words").read_text().splitlines()) == code, capsys.readouterr().out


def test_the_plain_loop_ends_with_a_verdict(script, tmp_path: Path, capsys):
    recipe = (EXAMPLES.parent / "conf" / "precision" / "mxfp8.yaml").read_text()
    (tmp_path / "eager.yaml").write_text(
        recipe + "casts: eager\n"
    )  # the same bits; compilation takes longer than 30 steps
    assert script("plain_loop.py", "--recipe", "eager.yaml", "--steps", "30", "--seeds", "2") == 0
    printed = capsys.readouterr().out
    assert "eager.yaml" in printed
    assert "fp32" in printed


@pytest.mark.full
def test_the_trainer_run_ends_with_a_verdict(script, capsys):
    assert script("hf_trainer_mxfp8.py", "--steps", "40", "--seeds", "2") == 0
    printed = capsys.readouterr().out
    assert "lm_head" in printed
    assert "eval_loss" in printed


@pytest.mark.full
def test_the_fsdp2_loop_logs_lines_that_compare_reads(tmp_path: Path, capsys):
    words = []
    for recipe, arm in (("none", "bf16"), ("mxfp8", "mxfp8")):
        for seed in (0, 1):
            log = tmp_path / f"{arm}-{seed}.log"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += [str(EXAMPLES / "fsdp2_loop.py"), "--recipe", recipe, "--seed", str(seed), "--steps", "40"]
            subprocess.run([*command, "--output", str(log)], check=True)
            words.append(f"{arm}/{seed}={log}")
    assert main(["compare", "--from", *words, "--baseline", "bf16"]) == 0
    assert "mxfp8" in capsys.readouterr().out
