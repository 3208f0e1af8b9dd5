"""Verdicts over curves that other trainers logged."""
