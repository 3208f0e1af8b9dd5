"""One run, from a checked config to its exit code: environment, start, resume, assembly, training."""
