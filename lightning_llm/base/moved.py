"""Import paths of the previous release, which keep working for one release with a DeprecationWarning.

The first finder of `sys.meta_path` maps these paths to their new modules.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "lightning_llm.config.schema.algorithm": "lightning_llm.config.schema.optim",
    "lightning_llm.config.schema.block": "lightning_llm.config.schema.model",
    "lightning_llm.data.addressing": "lightning_llm.data.mixing.addressing",
    "lightning_llm.data.loader": "lightning_llm.data.sources",
    "lightning_llm.data.tokenised": "lightning_llm.data.tokens.tokenised",
    "lightning_llm.errors": "lightning_llm.base.errors",
    "lightning_llm.keyed_hash": "lightning_llm.base.keyed_hash",
    "lightning_llm.model.ffn": "lightning_llm.model",
    "lightning_llm.model.ffn.dense_spec": "lightning_llm.model.kinds",
    "lightning_llm.registry": "lightning_llm.base.registry",
}
"""Old path -> new path of modules and packages in the previous release's `docs/howto/extend.md`."""


def new_path(old: str) -> str | None:
    """Return the new import path of the module `old`, or None if it has not moved."""
    package, _, module = old.rpartition(".")
    return MOVED.get(old) or (f"{MOVED[package]}.{module}" if package in MOVED else None)


class MovedModules:
    """Finder and loader of the modules in `MOVED`."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec for a moved module, None for any other."""
        return ModuleSpec(name, self, is_package=True) if new_path(name) else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create an empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Replace `module` by the new module, after a warning."""
        old = module.__name__
        new = str(new_path(old))
        text = f"{old} has moved to {new}; the old path is removed in the next release"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        sys.modules[old] = import_module(new)


def install() -> None:
    """Add the finder to `sys.meta_path`, once."""
    if not any(isinstance(each, MovedModules) for each in sys.meta_path):
        sys.meta_path.insert(0, MovedModules())
