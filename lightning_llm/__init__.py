"""lightning-llm: compare LLM pre-training recipes; see README.md."""

from pathlib import Path

__version__ = "0.1.0"

# A bare checkout keeps callbacks/, conf/ and recipes/ at its top; both kinds of installation map them into the package.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "pyproject.toml").is_file() and (_checkout / "recipes").is_dir():
    __path__.append(str(_checkout))
