"""Bytes that a rank holds, by formula. Imports no torch."""
