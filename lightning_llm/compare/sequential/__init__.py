"""Verdicts at declared looks."""
