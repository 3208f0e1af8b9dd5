"""One run, from a checked plan to its exit code: environment, start, resume, training."""
