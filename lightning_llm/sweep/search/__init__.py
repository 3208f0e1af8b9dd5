"""Sweeps that choose their jobs as they go: values by Optuna, recipes by successive halving."""
