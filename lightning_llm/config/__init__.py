"""Words -> `Config`: schema, composing, overrides, recipes, identity, config files. Imports no torch."""
