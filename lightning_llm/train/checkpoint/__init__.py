"""A run's whole state on disk: written, sealed, verified, kept, and read back under any layout."""
