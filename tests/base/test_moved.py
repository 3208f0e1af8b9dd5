"""Import paths that the previous release documented still work, and warn."""

import sys
from importlib import import_module

import pytest

DOCUMENTED = {
    "lightning_llm.config.schema.algorithm": ("ALGORITHMS", "AlgorithmConfig"),
    "lightning_llm.config.schema.base": ("Fraction", "PositiveInt"),
    "lightning_llm.config.schema.block": ("FEED_FORWARDS", "NORMS"),
    "lightning_llm.config.schema.data": ("LOADERS", "MIXTURES", "MixtureConfig", "SourceConfig"),
    "lightning_llm.config.schema.optim": ("OPTIMIZERS", "SCHEDULES", "OptimConfig", "ParameterShard", "ScheduleConfig"),
    "lightning_llm.data.addressing": ("MixturePhase",),
    "lightning_llm.data.loader.files": ("find_files",),
    "lightning_llm.data.tokenised": ("TokenReader",),
    "lightning_llm.errors": ("ConfigError", "Problem"),
    "lightning_llm.model.ffn.dense_spec": ("DenseSpec",),
    "lightning_llm.model.linear": ("Linear",),
    "lightning_llm.model.spec": ("Norm",),
    "lightning_llm.optim.optimizer": ("groups_of",),
}
"""The imports and names of `docs/howto/extend.md` at version 0.1, module by module."""
MOVED = (
    "lightning_llm.config.schema.algorithm", "lightning_llm.config.schema.block", "lightning_llm.data.addressing",
    "lightning_llm.data.loader.files", "lightning_llm.errors", "lightning_llm.data.tokenised",
    "lightning_llm.model.ffn.dense_spec",
)  # fmt: skip


@pytest.mark.parametrize("module", DOCUMENTED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_documented_imports_of_the_previous_release_work(module):
    found = import_module(module)
    assert [name for name in DOCUMENTED[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize("module", MOVED)
def test_an_old_path_warns_and_gives_the_module_itself(module, monkeypatch):
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.warns(DeprecationWarning, match=f"{module} has moved to lightning_llm"):
        found = import_module(module)
    assert found is sys.modules[found.__name__]
    assert found.__name__ != module


def test_a_path_that_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        import_module("lightning_llm.loader")
