"""Golden curves: the first steps of a recipe, recorded, and compared with the same steps run again. Imports nothing."""

STEPS = 10
"""Default of `golden record`: seconds of a small recipe, and more steps than a wrong gradient takes to reach the loss
(docs/howto/golden.md)."""
FALSE_ALARMS = 0.01
"""Default of `golden check`: share of checks of an unchanged program that may fail. One in a hundred is seldom enough
for a reader of a CI to look at each; doubling or halving it moves a band by some 15 % (6 runs, 3,000 numbers)."""
