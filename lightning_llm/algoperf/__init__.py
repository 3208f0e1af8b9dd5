"""Time to target over many runs, scored by AlgoPerf's rules."""
