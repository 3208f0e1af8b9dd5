"""Hugging Face's architectures: which blocks each has, under which names, and with which config.json."""
