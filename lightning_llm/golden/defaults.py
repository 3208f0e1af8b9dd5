"""What `golden record` and `golden check` do unless told otherwise. Imports nothing."""

STEPS = 10
"""So many steps are seconds of a small recipe, and more than a wrong gradient takes to reach the loss (docs/golden.md).
"""
FALSE_ALARMS = 0.01
"""The share of checks of an unchanged program that may fail, unless told otherwise: one in a hundred is seldom enough
for a reader of a CI to look at each, and doubling or halving it moves a band by some 15 % (6 runs, 3,000 numbers)."""
