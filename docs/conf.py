"""Sphinx configuration of the documentation: `make docs`."""

import re
from typing import Any

from lightning_llm.base import __version__

project = "lightning-llm"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"lightning-llm {__version__}"

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

default_role = "code"  # docstrings use single backticks for code
autodoc_member_order = "bysource"
autodoc_default_options = {"exclude-members": "model_config, module"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False


OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+(?:\w+/)*[A-Z]+\.md)\)")
"""A link to a Markdown file that is no page, such as CONTRIBUTING.md or benchmarks/README.md."""


def offer_files_outside(app: Any, page: str, source: list[str]) -> None:
    """Turn links to Markdown files outside docs/ into downloads: Sphinx builds no page for them."""
    source[0] = OUTSIDE.sub(r"{download}`\1 <\2>`", source[0])


NAPOLEON = 500
"""Priority at which napoleon rewrites docstrings."""
attributes: dict[str, list[str]] = {}


def keep_attribute(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Remember the docstring of an attribute: napoleon would read `text: text` as a type and its description."""
    if what in ("attribute", "property", "data"):
        attributes[name] = list(lines)


def restore_attribute(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Restore the docstring that napoleon took apart."""
    if name in attributes:
        lines[:] = attributes.pop(name)


def setup(app: Any) -> None:
    """Register the hooks above."""
    app.connect("source-read", offer_files_outside)
    app.connect("autodoc-process-docstring", keep_attribute, priority=NAPOLEON - 1)
    app.connect("autodoc-process-docstring", restore_attribute, priority=NAPOLEON + 1)
