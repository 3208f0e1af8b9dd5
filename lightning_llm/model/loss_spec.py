"""What is known of the loss without torch."""

CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 27}
"""Logits that the loss takes to fp32 at once, by kind of device."""
