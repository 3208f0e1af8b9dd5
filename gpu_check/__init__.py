"""Checks that need a GPU: `make gpu-check`, or `python -m gpu_check [CHECK ...]`. See docs/howto/gpu_check.md."""
