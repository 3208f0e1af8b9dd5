"""Transformer Engine: what a device offers, which recipes run natively there, and the layers that do."""
