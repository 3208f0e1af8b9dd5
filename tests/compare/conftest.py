"""What keeps `compare` quick where its pictures are not looked at."""

import pytest

from lightning_llm.compare import report


@pytest.fixture
def undrawn(monkeypatch, request):
    """Leave the pictures out, half a second each time, but where the report itself is looked at."""
    if "report_holds" not in request.node.name:
        for name in ("draw_curves", "draw_intervals", "draw_speed"):
            monkeypatch.setattr(report, name, lambda *_: "<svg/>")
