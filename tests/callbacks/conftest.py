import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from protocol_module import make_config

from lightning_llm.config.schema import Config

if TYPE_CHECKING:
    from mlflow import MlflowClient


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return make_config(tmp_path)


@pytest.fixture(autouse=True)
def _no_outer_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def store(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "MlflowClient":
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
