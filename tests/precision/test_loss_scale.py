"""The loss scale as a state machine, against torch's own update and Megatron-LM's rule written out."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_llm.config.schema.precision import LossScalingConfig
from lightning_llm.precision.loss_scale import LossScale


def scales(config, overflows):
    """Return the scale that each step has, and the one after them."""
    state = LossScale.initial(config)
    found = [state.scale]
    for overflow in overflows:
        state = state.after_step(overflow, config)
        found.append(state.scale)
    return found


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 4))
@example([False, False, True, False, False, False, False, False, False], 3)  # an overflow counts the good steps anew
def test_without_hysteresis_it_is_torchs_grad_scaler(overflows, interval):
    config = LossScalingConfig(init_scale=2.0**10, growth_interval=interval, hysteresis=1, min_scale=None)
    scale, good = torch.full((1,), 2.0**10), torch.zeros(1, dtype=torch.int32)
    expected = [scale.item()]
    for overflow in overflows:
        torch._amp_update_scale_(
            scale, good, torch.tensor([float(overflow)]), config.growth_factor, config.backoff_factor, interval
        )
        expected.append(scale.item())
    assert scales(config, overflows) == expected


def test_with_hysteresis_it_is_megatrons_dynamic_grad_scaler():
    """Patience is spent by overflows, however far apart, and comes back with growth alone; the floor holds."""
    config = LossScalingConfig(init_scale=8.0, growth_interval=3, hysteresis=2, min_scale=2.0)
    yes, no = True, False
    overflows = [yes, no, yes, yes, yes, no, no, no, yes, yes, no, no, no, no, no, no]
    assert scales(config, overflows) == [8, 8, 8, 4, 2, 2, 2, 2, 4, 4, 2, 2, 2, 4, 4, 4, 8]


@pytest.mark.parametrize("largest", [2.0**126, 2.0**127])
def test_it_grows_to_no_infinity(largest):
    config = LossScalingConfig(init_scale=largest, growth_interval=1, hysteresis=1)
    assert scales(config, [False, False]) == [largest, 2.0**127, 2.0**127]
