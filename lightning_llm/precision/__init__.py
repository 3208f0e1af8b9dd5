"""Precision recipes carried out: casts, quantised linears, module rules, lint, loss scaling."""
