"""One cast: blocks, scales, rounding, and the compiled kernels."""
