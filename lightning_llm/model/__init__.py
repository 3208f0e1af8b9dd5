"""The decoder and its parts; independent of number formats and ranks."""
