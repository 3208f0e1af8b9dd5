"""Tokenizers, encoding in several processes, files of tokens, and text of generated tokens."""
