"""The verdict over runs: pairs, confounders, and whether the gap in loss is below the margin."""
