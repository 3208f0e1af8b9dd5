"""A sweep of four recipes, and a fixture that skips drawing, for tests that do not look at pictures."""

from pathlib import Path

import pytest

from tests.compare.run_folders import make_sweep


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """Four recipes at three seeds: one lossless against bf16, one lossy, one too near the margin to decide."""
    gaps = {
        "precision=bf16": 0.0,
        "precision=mxfp4_sr": 0.002,
        "precision=mxfp4_rne": 0.06,
        "precision=fp8_current": 0.0097,
    }
    return make_sweep(tmp_path_factory.mktemp("outputs") / "exp" / "sweep", gaps)
