"""Recorded vectors: all eagerly, a selection compiled (all in the full suite); planted errors are caught."""

import json
from pathlib import Path

import numpy as np
import pytest

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.schema.number_formats import NUMBER_FORMATS
from lightning_llm.precision.cast import rounding, scales
from lightning_llm.precision.conformance import run_conformance

VECTORS = Path(__file__).parent / "vectors"


def failures(verdicts):
    return {verdict.case: verdict.errors for verdict in verdicts if not verdict.passed}


def test_every_case_passes_eagerly():
    verdicts = run_conformance(VECTORS, compiled=False)
    assert failures(verdicts) == {}
    assert len(verdicts) == 266
    assert sum(verdict.checks for verdict in verdicts) == 868


@pytest.mark.parametrize(
    "wrong", ["floor for ceil", "half away for even", "flushed subnormals", "reciprocal for division"]
)
def test_a_planted_error_is_caught(wrong, monkeypatch):
    if wrong == "floor for ceil":
        monkeypatch.setattr(scales, "e8m0_ceil", lambda amax, _: scales.e8m0_floor(amax, NUMBER_FORMATS["e4m3"]))
    elif wrong == "half away for even":
        monkeypatch.setattr(rounding, "nearest_number", lambda v, fmt: rounding.round_to_format(v, fmt, "half_away"))
    elif wrong == "flushed subnormals":
        right = rounding.nearest_number
        monkeypatch.setattr(
            rounding, "nearest_number", lambda v, fmt: right(v, fmt) * (v.abs() >= 2.0**fmt.min_exponent)
        )
    else:
        monkeypatch.setattr(scales, "divide", lambda numerator, denominator: denominator.reciprocal() * numerator)
    assert failures(run_conformance(VECTORS, compiled=False))


def test_recipes_and_arrays_without_a_check_fail(tmp_path):
    np.savez(tmp_path / "a.npz", c__x=np.ones((2, 32), np.float32), c__expected=np.ones((2, 32), np.float32))
    case = {"name": "c", "file": "a.npz", "arrays": ["x", "expected"], "recipe": "int4"}
    (tmp_path / "manifest.json").write_text(json.dumps({"cases": [case]}))
    (verdict,) = run_conformance(tmp_path, compiled=False)
    assert verdict.errors == ("no check for recipe 'int4'",)


def test_a_wrong_number_is_reported(tmp_path):
    x = np.ones((2, 32), np.float32)
    expected = x.copy()
    expected[1, 3] = 2
    np.savez(tmp_path / "a.npz", c__x=x, c__expected=expected)
    case = {"name": "c", "file": "a.npz", "arrays": ["x", "expected"], "recipe": "MX (OCP floor scale)"}
    (tmp_path / "manifest.json").write_text(json.dumps({"cases": [case | {"format": "e4m3", "rounding": "RNE"}]}))
    (verdict,) = run_conformance(tmp_path, compiled=False)
    assert verdict.errors == ("expected: 1 of 64 differ; first at 35: 1.0, recorded 2.0",)


def test_unreadable_folders_are_user_errors(tmp_path):
    with pytest.raises(ConfigError, match="contains no vectors"):
        run_conformance(tmp_path, compiled=False)
    case = {"name": "c", "file": "a.npz", "arrays": ["x"], "recipe": "mxfp8"}
    (tmp_path / "manifest.json").write_text(json.dumps({"cases": [case]}))
    with pytest.raises(ConfigError, match=r"a\.npz: cannot be read"):
        run_conformance(tmp_path, compiled=False)
    np.savez(tmp_path / "a.npz", other=np.ones(2))
    with pytest.raises(ConfigError, match="lacks"):
        run_conformance(tmp_path, compiled=False)
