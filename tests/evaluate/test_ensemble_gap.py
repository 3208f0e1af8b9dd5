"""The gain of an ensemble: its interval by simulation, its figures against those of each model evaluated alone."""

import json
from pathlib import Path

import numpy as np
import pytest

from lightning_llm.__main__ import main
from lightning_llm.evaluate.validation import Gap


def test_the_interval_covers_the_true_gap():
    """Sequences of different length and difference: 95 % of 1,000 intervals contain the true mean per token."""
    generator, held = np.random.default_rng(0), 0
    for _ in range(1000):
        tokens = generator.integers(20, 128, 48).astype(float)
        level = -0.03 + generator.standard_t(5, 48) * 0.1
        gap = Gap.from_differences(level * tokens, tokens)
        held += gap.low <= -0.03 <= gap.high
    assert 0.93 <= held / 1000 <= 0.97
    assert Gap.from_differences(np.array([-1.0]), np.array([10.0])).low == -np.inf


def test_gains_are_differences_from_members_evaluated_alone(trained, capsys):
    steps = [str(trained / "checkpoints" / f"step={step}") for step in (2, 4)]

    def asked(*words) -> dict:
        assert main(["evaluate", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    alone = [asked(step)["metrics"]["val_loss"] for step in steps]
    found = asked("--ensemble", *steps)
    assert found["gain"]["members"] == pytest.approx(alone, rel=1e-6)
    for combine in ("probabilities", "logits"):
        loss = found["metrics"][combine]["val_loss"]
        best, mean = (found["gain"][key][combine] for key in ("to_best", "to_mean"))
        assert best["gap"] == pytest.approx(loss - min(alone), abs=1e-6)
        assert mean["gap"] == pytest.approx(loss - sum(alone) / 2, abs=1e-6)
        assert best["low"] < best["gap"] < best["high"]
    assert json.loads(Path(found["file"]).read_text())["gain"] == found["gain"]
    assert main(["evaluate", "--ensemble", *steps]) == 0
    assert "against the best" in capsys.readouterr().out
