"""Built-in kinds of casts, one class each: scales, roundings, transforms, gradient rules."""
