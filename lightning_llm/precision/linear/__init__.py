"""The quantized linear layer."""
