"""The detector alone, on steps like a real run's: kinds of events and error rates. 6 seconds."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from pydantic import ValidationError

from lightning_llm.config.schema import SpikesConfig
from lightning_llm.train.spikes import Finding, SpikePolicy, SpikeState, SpikeStop
from tests.train.noise import clean_steps, false_alarms, read_curve

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
    """Return clean steps with changes by index: `losses` is added to the loss, `norms` multiplies the gradient norm."""
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


def level_at(loss: float, **changes) -> SpikeState:
    """Return the state at a quiet level; sigmas are the floors: 0.01 of the loss, 0.1 of the norm's logarithm."""
    quiet = {"losses": (loss,) * 128, "log_norms": (0.0,) * 128, "regime_steps": 128, "first_loss": 7.0}
    return SpikeState(**{**quiet, "lowest_level": 3.0, **changes})


@pytest.mark.parametrize(("diverged", "loss", "still"), [
    (False, 4.9, False), (False, 5.1, True),  # half of the 4 nats that were learned
    (True, 4.9, True), (True, 4.1, True), (True, 3.9, False),  # once lost, until half of that is found again
])  # fmt: skip
def test_a_divergence_is_over_when_half_of_what_makes_one_is_found_again(diverged, loss, still):
    finding, after = level_at(loss, diverged=diverged).after(loss, 1.0, CONFIG)
    assert after.diverged == still
    assert (finding is not None and finding.kind == "divergence") == (still and not diverged)


@pytest.mark.parametrize(("regime", "found"), [(7, None), (8, "spike"), (9, "spike")])
def test_a_level_is_known_after_half_of_its_steps(regime, found):
    finding, after = level_at(3.0, regime_steps=regime).after(9.0, 1.0, CONFIG)
    assert (finding and finding.kind) == found
    assert (after.events, after.regime_steps) == (int(found is not None), regime + 1)


@pytest.mark.parametrize(("loss", "norm", "found"), [
    (3.069, 1.0, None), (3.071, 1.0, "spike"), (3.0, math.exp(1.19), None), (3.0, math.exp(1.21), "spike"),
])  # fmt: skip
def test_a_spike_is_above_its_threshold_in_sigmas(loss, norm, found):
    finding, _ = level_at(3.0).after(loss, norm, CONFIG)
    assert (finding and finding.kind) == found
    if finding:
        assert finding.loss_level == 3.0
        assert finding.grad_norm_level == 1.0
        assert finding.loss_score == pytest.approx((loss - 3.0) / 0.01)
        assert finding.grad_norm_score == pytest.approx(math.log(norm) / 0.1)


def test_the_sum_of_excesses_is_bounded_by_step_and_begins_anew_at_a_shift():
    """Each step adds its excess over the usual loss, 4 sigmas at most, less 1 that is free: a shift at 10."""
    state, kinds_found, shifts = level_at(3.0), [], []
    for loss in (3.03, 3.5, 3.03, 2.9, 3.03, 3.05, 3.035, 3.06):  # +2, +3, +2, 0 (from 7 - 11), +2, +3, +2.5, +3
        finding, state = state.after(loss, 1.0, CONFIG)
        kinds_found.append(finding and finding.kind)
        shifts.append(state.shift)
    assert shifts == [pytest.approx(each) for each in (2, 5, 7, 0, 2, 5, 7.5, 0)]
    assert kinds_found == [None, "spike", None, None, None, None, None, "plateau_shift"]
    assert (state.regime_steps, state.shift_steps) == (4, 0)  # the level is that of the four steps that made the sum


@pytest.mark.parametrize(
    ("policy", "kind", "actions"),
    [
        ("skip", "spike", ["skip", "skip", "stop"]),
        ("skip", "non_finite", ["skip", "skip", "stop"]),
        ("skip", "plateau_shift", ["log"]),
        ("log", "spike", ["log", "log", "log"]),
        ("log", "non_finite", ["stop"]),
        ("stop", "plateau_shift", ["stop"]),
        ("rollback", "spike", ["rollback", "rollback", "stop"]),
        ("rollback", "divergence", ["log"]),
    ],
)
def test_the_action_of_each_policy_and_how_often_it_is_taken(policy, kind, actions):
    found = []
    for made in range(len(actions)):
        judge = SpikePolicy(SpikesConfig(policy=policy, max_consecutive_skips=2, max_rollbacks=2), rollbacks_made=made)
        judge.state = SpikeState(skips_in_a_row=made)
        found.append(judge._action(Finding(kind)))
    assert found == actions


def test_a_step_that_is_made_ends_a_row_of_skips():
    policy = SpikePolicy(SpikesConfig(policy="skip", max_consecutive_skips=2))
    policy.state = level_at(3.0)
    rows = []
    for loss in (9.0, 9.0, 3.0, 9.0, math.nan, 3.0, 9.0):
        skipped = policy.judge({"loss": loss, "grad_norm": 1.0, "step": 1})
        assert skipped == (loss != 3.0)
        rows.append(policy.state.skips_in_a_row)
    assert rows == [1, 2, 0, 1, 2, 0, 1]
    assert policy.state.regime_steps == 128
    assert policy.state.events == 5
    policy.state = level_at(3.0, shift=8.0, skips_in_a_row=2)
    assert not policy.judge({"loss": 3.04, "grad_norm": 1.0, "step": 1})  # a shift: the step is made
    assert (policy.state.skips_in_a_row, policy.state.events) == (0, 1)
    assert policy.state.shift == 0  # skipped steps are no part of a shift


def test_a_window_that_is_too_short_is_rejected():
    with pytest.raises(ValidationError, match="at least twice level_steps=65"):
        SpikesConfig(level_steps=65)
