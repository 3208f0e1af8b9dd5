"""Search for the fastest layout that fits (`plan --search`). Imports no torch."""
