"""The detector alone, on steps like a real run's: what it calls what, and how often it is wrong. 6 seconds."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from noise import clean_steps, false_alarms, read_curve
from pydantic import ValidationError

from lightning_llm.config.schema import SpikesConfig
from lightning_llm.train.health.spike_policy import SpikePolicy, SpikeStop
from lightning_llm.train.health.spikes import SpikeState

CONFIG = SpikesConfig()
STEPS = 300
AT = 200


def kinds(steps) -> list[tuple[int, str]]:
    """Return (index, kind) of each finding."""
    state, found = SpikeState(), []
    for index, (loss, norm) in enumerate(steps):
        finding, state = state.after(loss, norm, CONFIG)
        if finding is not None:
            found.append((index, finding.kind))
    return found


def planted(losses=None, norms=None, seed: int = 0) -> list[tuple[float, float]]:
    """Return clean steps with what `losses` and `norms` (index -> change) add to the loss and multiply the norm by."""
    losses, norms = losses or (lambda i: 0.0), norms or (lambda i: 1.0)
    return [(loss + losses(i), norm * norms(i)) for i, (loss, norm) in enumerate(clean_steps(STEPS, seed))]


@pytest.mark.parametrize("seed", range(3))
def test_kinds_are_told_apart(seed):
    assert kinds(planted(seed=seed)) == []
    assert kinds(planted(lambda i: 2.5 * (i == AT), seed=seed)) == [(AT, "spike")]
    assert kinds(planted(norms=lambda i: 8.0 if i == AT else 1.0, seed=seed)) == [(AT, "spike")]
    low = kinds(planted(lambda i: -2.5 * (i == AT), lambda i: 0.1 if i == AT else 1.0, seed=seed))
    assert low == []

    shifted = kinds(planted(lambda i: 0.45 * (i >= AT), seed=seed))  # three sigma, for good
    assert [kind for _, kind in shifted] == ["plateau_shift"]
    assert AT + 3 <= shifted[0][0] <= AT + 30

    lost = kinds(planted(lambda i: 0.1 * max(0, i - AT), lambda i: 1.02 ** max(0, i - AT), seed=seed))
    assert lost[0][1] in ("plateau_shift", "spike")
    assert [kind for _, kind in lost].count("divergence") == 1

    steps = planted(seed=seed)
    steps[AT], steps[AT + 1] = (math.nan, steps[AT][1]), (steps[AT][0], math.inf)
    assert kinds(steps) == [(AT, "non_finite"), (AT + 1, "non_finite")]


def test_the_first_steps_decide_nothing_but_what_is_not_finite():
    steps = [(7.0, 1.0)] * 31 + [(50.0, 50.0), (50.0, 50.0)]
    assert kinds(steps) == [(32, "spike")]
    assert kinds([(math.nan, 1.0)]) == [(0, "non_finite")]


def test_real_curves_have_no_false_alarm():
    losses, log_norms = read_curve()
    assert len(losses) == 600
    assert kinds(zip(losses.tolist(), np.exp(log_norms).tolist(), strict=True)) == []


def test_at_most_one_false_alarm_in_ten_thousand_steps():
    assert sum(false_alarms(40_000, seed=1).values()) <= 4


def test_state_survives_json_to_the_same_bits():
    steps = planted(lambda i: 0.5 * (i > AT) + 3 * (i == AT + 1))
    state = SpikeState()
    for loss, norm in steps[: AT + 3]:
        _, state = state.after(loss, norm, CONFIG)
    assert state.shift > 0
    assert state.events == 1
    again = SpikeState.from_json(json.loads(json.dumps(asdict(state))))
    assert again == state
    assert len(state.losses) == CONFIG.window_steps
    assert SpikeState.from_json({}) == SpikeState()


@pytest.mark.parametrize("height", [2.5, 50.0])
def test_bad_batches_in_a_row_are_all_left_out_until_they_cannot_be_the_data(height):
    """However many: they are no shift of the level, since nothing is learned from them."""
    policy, skipped = SpikePolicy(SpikesConfig(policy="skip")), []
    steps = planted(lambda i: height * (AT <= i < AT + 8 or i >= AT + 40))

    def run() -> None:
        for index, (loss, norm) in enumerate(steps):
            if policy.judge({"loss": loss, "grad_norm": norm, "step": index + 1}):
                skipped.append(index)

    with pytest.raises(SpikeStop, match="the 8 before it"):
        run()
    assert skipped == [*range(AT, AT + 8), *range(AT + 40, AT + 48)]


def test_a_window_too_short_to_judge_by_is_refused():
    with pytest.raises(ValidationError, match="at least twice level_steps 65"):
        SpikesConfig(level_steps=65)
