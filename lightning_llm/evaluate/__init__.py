"""Evaluation of trained weights: validation losses and tasks of lm-eval, of one model, an average or an ensemble."""
