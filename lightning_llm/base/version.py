"""The version in `lightning-llm --version`, in the package's metadata and in summaries of runs."""

__version__ = "0.1.0"
