"""Text on a terminal: control characters made visible, and signs that something takes a while."""
