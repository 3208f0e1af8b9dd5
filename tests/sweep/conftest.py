import pytest
from short_jobs import start_short_jobs


@pytest.fixture
def short_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that take half a second and fail for seed 2, in place of training."""
    start_short_jobs(monkeypatch)
