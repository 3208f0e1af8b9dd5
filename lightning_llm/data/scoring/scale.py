"""Scores on one scale."""

import numpy as np


def to_unit(values: np.ndarray) -> np.ndarray:
    """Return float64 `values` moved and stretched to [0, 1]; all 1 where they are equal."""
    span = np.ptp(values)
    return (values - values.min()) / span if span > 0 else np.ones_like(values)
