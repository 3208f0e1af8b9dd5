"""Runs scored by AlgoPerf's rules, instead of judged by their losses."""
