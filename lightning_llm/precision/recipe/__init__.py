"""A precision recipe as data: which layers, rules, coverage. Imports no torch."""
