"""Intervals, power and tests behind verdicts."""
