"""Every layout file is in a matrix of tests that compares the complete state."""

import copy

import pytest
import torch

from tests.parallel.curve_limits import FP32, exceeded, off
from tests.parallel.layout_matrix import NAMES
from tests.parallel.test_equal_layouts import COVERING as EQUAL
from tests.parallel.test_equal_pipelines import CLOSE_CASES
from tests.parallel.test_equal_pipelines import COVERING as EQUAL_STAGES
from tests.parallel.test_model_parallel import COVERING as CLOSE
from tests.parallel.test_model_parallel import FULL as CLOSE_IN_FULL


def test_every_layout_file_is_compared_with_one_rank():
    compared = {case.layout for case in (*EQUAL, *EQUAL_STAGES, *CLOSE, *CLOSE_IN_FULL)}
    assert compared | {layout for layout, *_ in CLOSE_CASES} == set(NAMES)


@pytest.mark.parametrize("spoiled", [("curve", 0, 2), ("curve", 0, 3), ("gradients", 1, "w"), ("parameters", "w", 0)])
def test_the_comparison_finds_nan(spoiled):
    gradients = [{"w": torch.ones(2)} for _ in range(2)]
    curve = [[1, 128, 6.0, 0.5, 1e-3, None, None]]
    alone = {"curve": curve, "gradients": gradients, "parameters": {"w": torch.ones(2)}}
    ours = copy.deepcopy(alone)
    key, place, element = spoiled
    ours[key][place][element] *= float("nan")
    assert exceeded(off(alone, alone), FP32) == []
    assert len(exceeded(off(ours, alone), FP32)) == 1
