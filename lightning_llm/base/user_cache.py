"""The folder within the user's cache folder where all that can be made again is kept: token caches and kernels."""

from pathlib import Path


def user_cache_dir() -> Path:
    """Return it; it may not be there yet."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("lightning-llm"))
