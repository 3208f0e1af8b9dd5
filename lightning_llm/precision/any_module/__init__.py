"""A precision recipe in any module and training loop: `quantize` (docs/howto/quantize_any_model.md)."""
