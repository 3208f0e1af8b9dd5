from pathlib import Path

import pytest
from protocol_module import make_config

from lightning_llm.schema import Config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path)


@pytest.fixture(autouse=True)
def _no_outer_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
