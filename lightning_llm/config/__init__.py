"""Overrides -> `Config`: schema, composition, presets, config hash. Imports no torch."""
