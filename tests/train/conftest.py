from pathlib import Path

import pytest

from lightning_llm.__main__ import main


@pytest.fixture(scope="session")
def whole(tmp_path_factory, small_run) -> Path:
    """The folder of a run of six steps, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(["train", *small_run(folder)]) == 0
    return folder / "run"
