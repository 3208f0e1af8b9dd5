"""Foundation of all other packages: errors, registry, hashing, hardware, files, terminal, signals."""

__version__ = "0.1.0"
"""The version in `lightning-llm --version`, in the package's metadata and in summaries of runs."""
