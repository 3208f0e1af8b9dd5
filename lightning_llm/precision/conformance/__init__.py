"""Recorded vectors of other libraries, case by case, against the emulation."""
