"""Softmax attention: kinds, modules, kernels, and the cache of keys and values."""
