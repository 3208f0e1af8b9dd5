"""Optimizers, learning-rate schedules, bytes of their state."""
