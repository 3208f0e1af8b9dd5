from types import SimpleNamespace

import pytest

from lightning_llm.sweep import launchers as local
from tests.sweep.forked_jobs import ForkedJob
from tests.sweep.short_jobs import start_short_jobs


@pytest.fixture
def short_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that take half a second and fail for seed 2, in place of training."""
    start_short_jobs(monkeypatch)


@pytest.fixture
def forked_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that train, each some seconds cheaper."""
    monkeypatch.setattr(local, "subprocess", SimpleNamespace(Popen=ForkedJob))
