"""Overrides -> `Config`: schema, composing, recipes, config hash, config files. Imports no torch."""
