"""Hugging Face's architectures, one file each: whose blocks they are, under which names and with which config.json."""
