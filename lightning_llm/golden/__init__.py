"""Golden curves: the first steps of a recipe, recorded, and compared with the same steps run again. Imports nothing."""

STEPS = 10
"""Default number of steps of `golden record`: a small recipe takes seconds, and a wrong gradient reaches the loss in
fewer steps (docs/howto/golden.md)."""
FALSE_ALARMS = 0.01
"""Default of `golden check`: share of checks of an unchanged program that may fail. One in a hundred is rare enough to
look at each failure; doubling or halving it changes the width of a band by some 15 % (6 runs, 3,000 numbers)."""
