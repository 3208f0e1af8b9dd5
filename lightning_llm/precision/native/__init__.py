"""Transformer Engine: capabilities of devices, the recipes that run natively there, and native layers."""
