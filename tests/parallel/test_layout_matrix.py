"""Every layout file is in a matrix."""

from layout_matrix import NAMES
from test_equal_layouts import COVERING as EQUAL
from test_equal_pipelines import CLOSE_CASES
from test_equal_pipelines import COVERING as EQUAL_STAGES
from test_model_parallel import COVERING as CLOSE
from test_model_parallel import FULL as CLOSE_IN_FULL


def test_every_layout_file_is_compared_with_one_rank():
    compared = {case.layout for case in (*EQUAL, *EQUAL_STAGES, *CLOSE, *CLOSE_IN_FULL)}
    assert compared | {layout for layout, *_ in CLOSE_CASES} == set(NAMES)
