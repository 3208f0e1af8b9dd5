"""Execution of precision recipes: casts, quantized linear layers, module rules, lint, loss scaling."""
