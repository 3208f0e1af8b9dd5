"""The verdict over runs: which were paired, what else differed, and whether the gap in loss is below the margin."""
