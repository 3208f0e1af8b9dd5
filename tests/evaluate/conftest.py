from pathlib import Path

import pytest

from lightning_llm.__main__ import main


@pytest.fixture(scope="session")
def trained(tmp_path_factory, small_run) -> Path:
    """The folder of a run of four fp32 steps, validated and saved after the second and the fourth."""
    folder = tmp_path_factory.mktemp("trained")
    words = ("trainer.max_steps=4", "trainer.validate_every_steps=2", "model.max_sequence_length=128")
    assert main(["train", *small_run(folder, *words)]) == 0
    return folder / "run"


@pytest.fixture(scope="session")
def exported(tmp_path_factory, trained) -> Path:
    """The same weights as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert main(["export", str(trained), "--output", str(folder), "--no-parity"]) == 0
    return folder
