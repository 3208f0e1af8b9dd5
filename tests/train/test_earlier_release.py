"""A run that the release before the redesign (commit a4e23397) wrote still resumes and compares."""

import tarfile
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.reading import read_run
from lightning_llm.train.checkpoint.manifest import open_checkpoint
from tests.messages import missing
from tests.run_metrics import read_metrics

RUN = Path(__file__).parent / "run_of_a4e23397.tar.xz"
"""A finished run of 4 steps: one layer, fp8_delayed, with its data. @RUN@ and @ROOT@ in its config are its folders."""
NEXT_LOSSES = [(5, 6.33980131149292), (6, 6.307827949523926)]
"""Losses of the steps after, as a4e23397 continued to them."""


@pytest.fixture
def earlier_run(tmp_path: Path) -> Path:
    """The folder of the run, in `tmp_path`/experiment."""
    root = tmp_path / "experiment"
    with tarfile.open(RUN) as archive:
        archive.extractall(root, filter="data")
    config = root / "run" / "config.yaml"
    config.write_text(config.read_text().replace("@RUN@", str(root / "run")).replace("@ROOT@", str(root)))
    return root / "run"


def test_a_run_of_the_earlier_release_resumes_to_the_same_losses(earlier_run):
    run_id = summary_of(earlier_run)["run_id"]
    config = str(earlier_run / "config.yaml")
    words = ["resume=auto", "trainer.max_steps=6", "checkpoint.keep_last=2", "precision.casts=eager"]
    assert main(["train", "--config", config, *words]) == 0
    losses = [(each["step"], each["loss"]) for each in read_metrics(earlier_run) if "loss" in each and each["step"] > 4]
    assert losses == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in NEXT_LOSSES]
    assert summary_of(earlier_run)["run_id"] == run_id
    assert {open_checkpoint(earlier_run / "checkpoints" / f"step={step}").run_id for step in (4, 6)} == {run_id}
    assert missing(str(read_run(earlier_run).unverified), "earlier release", "step 4") == []  # without a hash chain


def test_compare_reads_a_run_of_the_earlier_release(earlier_run, tmp_path, capsys):
    config, other = str(earlier_run / "config.yaml"), earlier_run.with_name("other")
    words = [f"run.dir={other}", "optim.learning_rate=1e-2", "precision.casts=eager"]
    assert main(["train", "--config", config, *words]) == 0
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "experiment"), "--output", str(tmp_path / "report")]) == 0
    assert "optim against learning_rate=0.01" in capsys.readouterr().out
