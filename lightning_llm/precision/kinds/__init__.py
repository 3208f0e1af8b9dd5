"""Built-in kinds of casts, one class each: scales."""
