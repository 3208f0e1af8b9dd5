"""The verb `probe`: what recipes do to the gradients of weights that are already there."""
