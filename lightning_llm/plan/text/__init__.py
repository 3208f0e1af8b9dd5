"""A plan as data and as text. Imports no torch."""
