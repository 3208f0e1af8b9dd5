"""What a forkserver has composed and checked, no process forked from it does again: this module, on its import.

A third of a CPU second of each: the registries' modules, pydantic's and ANTLR's tables, Hydra's plugins, and the files
that `small_run` selects.
"""

import gc
from pathlib import Path

import lightning_llm.cli.command_line  # noqa: F401
from lightning_llm.config.compose import compose_config, open_composer
from lightning_llm.config.recipes import group_names
from lightning_llm.plan.check import check_config
from tests.small_runs import small_words

check_config(compose_config(["callbacks=none", "logger=none"]))
with open_composer(None) as composer:
    for group in group_names():
        composer.options(group)
for logger in ("none", "mlflow"):
    compose_config([*small_words(Path("/corpus"), Path("/run")), f"logger={logger}"])
# Half a million objects that garbage collection looks through again and again. A forked process that froze them itself
# would copy their pages.
gc.collect()
gc.freeze()
