"""Checks that need a GPU: `make gpu-check`, or `python -m gpu_check [G1 G2 ...]`. See docs/native.md."""
