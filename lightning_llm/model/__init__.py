"""The decoder and its parts, knowing neither number formats nor ranks."""
