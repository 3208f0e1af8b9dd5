"""The version: of `lightning-llm --version`, the package's metadata, and what is recorded of a run."""

__version__ = "0.1.0"
