"""Probing: the effect of precision recipes on the gradients of trained weights."""
