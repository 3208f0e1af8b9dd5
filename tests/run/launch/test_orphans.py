"""A launcher that is killed takes its ranks with it, and its folder is not trained in twice. 30 seconds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lightning_llm.__main__ import main
from tests.run_metrics import curve, read_metrics, steps_saved

ROOT = Path(__file__).parents[3]


@pytest.mark.full
def test_ranks_of_a_killed_launcher_save_and_stop_and_the_run_goes_on_to_the_same_bits(small_run, tmp_path, capsys):
    times = ["schedule.total_steps=300", "checkpoint.every_steps=null", "data.micro_batch_size=1"]
    words = small_run(tmp_path / "killed", *times, "trainer.max_steps=3000")
    run = tmp_path / "killed" / "run"
    command = [sys.executable, "-m", "lightning_llm", "train", *words, "parallel=zero3", "trainer.devices=2"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as launcher:
        metrics, deadline = run / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.is_file() and metrics.read_text().count("\n") >= 4) and time.monotonic() < deadline:
            time.sleep(0.05)
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        assert main(["train", *words, "parallel=ddp", "trainer.devices=2", "resume=auto"]) == 2
        assert "is training in" in capsys.readouterr().err
        os.kill(launcher.pid, signal.SIGKILL)
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert (len(gone) >= 2, alive) == (True, [])
    stopped_at = read_metrics(run)[-1]["step"]
    assert steps_saved(run) == [stopped_at]
    steps = stopped_at + 2
    resumed = small_run(tmp_path / "killed", *times, f"trainer.max_steps={steps}", "resume=auto")
    assert main(["train", *resumed]) == 0
    assert f"resume from step {stopped_at}" in capsys.readouterr().out
    assert main(["train", *small_run(tmp_path / "alone", *times, f"trainer.max_steps={steps}")]) == 0
    assert curve(run) == curve(tmp_path / "alone" / "run")
