"""The band of a golden curve: Student's t against tables and simulation, rounding, numbers that are not finite."""

import math

import numpy as np
import pytest
from scipy import stats

from lightning_llm.golden.comparison import first_difference
from lightning_llm.golden.curve import FP32_UNIT, Band, Curve, Noise, as_fp32
from lightning_llm.golden.file import Golden, read_golden, write_golden

STEPS, PARAMETERS = 4, 8


def curve_of(numbers: np.ndarray) -> Curve:
    """Return the curve of `numbers` [STEPS, PARAMETERS + 2]."""
    rounded = [[as_fp32(each) for each in column] for column in numbers.T]
    norms = {f"layers.{index}.weight": column for index, column in enumerate(rounded[2:])}
    return Curve(rounded[0], rounded[1], [1e-3] * STEPS, norms)


def drawn(generator: np.random.Generator, shared: float) -> Curve:
    """Return one run: each number scatters, and the share `shared` of the scatter is common to all numbers of a run."""
    shape = (STEPS, PARAMETERS + 2)
    scatter = 1e-5 * 10.0 ** (np.arange(PARAMETERS + 2) % 4) * np.arange(1, STEPS + 1)[:, None]
    noise = math.sqrt(shared) * generator.standard_normal() + math.sqrt(1 - shared) * generator.standard_normal(shape)
    return curve_of(3 * (1 + scatter * noise))


@pytest.mark.parametrize(("shared", "least"), [(0.0, 0.02), pytest.param(0.9, 0.0, marks=pytest.mark.full)])
def test_the_false_alarm_rate_of_a_band_is_the_stated_one(shared, least):
    generator, alarms, checks = np.random.default_rng(0), 0, 250
    for _ in range(checks):
        band = Band(Noise.of([drawn(generator, shared) for _ in range(4)], nudged=False), false_alarms=0.1)
        alarms += first_difference(drawn(generator, shared), drawn(generator, shared), band) is not None
    # Of 250 checks 25 are expected where numbers are independent: 40 are three standard deviations more.
    assert least <= alarms / checks <= 0.16


def test_the_width_is_that_of_a_prediction_interval():
    # t with 4 degrees of freedom leaves 0.5 % above 4.604 (any table), and the mean of five runs scatters, too.
    curves = [Curve([2.0 + each], [1.0], [0.0]) for each in (-2.0, -1.0, 0.0, 1.0, 2.0)]
    band = Band(Noise.of(curves, nudged=False), false_alarms=0.02)
    assert band.compared == 2  # the loss and the norm of all together
    assert band.deviations == pytest.approx(4.604 * math.sqrt(1.2), rel=1e-4)
    assert band.deviations == pytest.approx(stats.t.isf(0.005, 4) * math.sqrt(1.2), rel=1e-9)
    mean, width = band.interval("loss", 0)
    assert mean == 2.0
    assert width == pytest.approx(band.deviations * math.sqrt(2.5), rel=1e-3)


def test_runs_that_all_round_alike_leave_room_for_rounding_alone():
    curves = [Curve([4.0 + each], [8.0], [1e-3]) for each in (0, 1e-3, 2e-3)]
    band = Band(Noise.of(curves, nudged=False), false_alarms=0.05)
    mean, width = band.interval("grad_norm", 0)
    assert (mean, width) == (8.0, pytest.approx(band.deviations * 8 * FP32_UNIT / math.sqrt(12)))
    assert band.interval("lr", 0) == (1e-3, pytest.approx(FP32_UNIT * 1e-3))


def test_runs_of_the_same_bits_make_no_band():
    noise = Noise.of([Curve([1.0], [float("nan")], [1e-3])] * 3, nudged=True)
    assert (noise.mean, noise.sd, noise.as_data()) == (None, None, {"runs": 3, "nudged": True})


def test_numbers_that_are_not_finite_must_be_the_same():
    inf, nan = math.inf, math.nan
    curves = [Curve([1.0 + each], [inf], [1e-3], {"a": [nan]}) for each in (0, 1e-3, 2e-3)]
    band = Band(Noise.of(curves, nudged=False), false_alarms=0.05)
    assert band.interval("grad_norm", 0) is None
    assert first_difference(curves[0], Curve([1.0], [inf], [1e-3], {"a": [nan]}), band) is None
    found = first_difference(curves[0], Curve([1.0], [3.0], [1e-3], {"a": [nan]}), band)
    assert (found.quantity, found.recorded, found.now, found.relative) == ("grad_norm", inf, 3.0, None)
    assert first_difference(curves[0], Curve([1.0], [inf], [1e-3], {"a": [2.0]}), band).parameter == "a"


def test_other_parameters_and_a_run_that_ended_are_differences():
    whole = Curve([1.0, 2.0], [1.0, 1.0], [0.1, 0.1], {"a": [1.0, 1.0]})
    assert first_difference(whole, Curve([1.0], [1.0], [0.1], {"a": [1.0]}), None).quantity == "steps"
    found = first_difference(whole, Curve([1.0, 2.0], [1.0, 1.0], [0.1, 0.1], {"b": [1.0, 1.0]}), None)
    assert (found.quantity, found.parameter, found.others) == ("parameters", "a", 1)


def test_gradients_nearer_to_the_loss_come_first():
    then = Curve([1.0], [3.0], [0.1], {"embedding.weight": [1.0], "layers.0.w": [1.0], "head.weight": [1.0]})
    now = Curve([1.0], [3.5], [0.1], {"embedding.weight": [2.0], "layers.0.w": [1.5], "head.weight": [1.0]})
    found = first_difference(then, now, None)
    assert (found.parameter, found.others, found.relative) == ("layers.0.w", 2, 0.5)


def test_the_file_brings_every_number_back(tmp_path):
    generator = np.random.default_rng(1)
    numbers = np.exp(generator.normal(0, 20, (STEPS, PARAMETERS + 2)))
    numbers[1, 3], numbers[2, 4], numbers[3, 1] = math.inf, math.nan, -math.inf
    curves = [curve_of(numbers), curve_of(numbers * (1 + 1e-4)), curve_of(numbers * (1 - 1e-4))]
    golden = Golden(
        "mine", {"config": "0"}, {"seed": 0}, {}, True, {"device": "cpu"}, curves[0], Noise.of(curves, True)
    )
    write_golden(golden, tmp_path / "deep" / "mine.json")
    back = read_golden(tmp_path / "deep" / "mine.json")
    assert back.as_data() == golden.as_data()
    its = np.array(back.curve.loss, dtype=np.float32)
    assert its.tobytes() == numbers[:, 0].astype(np.float32).tobytes()
