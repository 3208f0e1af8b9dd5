"""Optimizers, learning-rate schedules, and the bytes of their state."""
