"""One config, composed and checked on import: what a forkserver has done, no process forked from it does again.

A third of a CPU second of each: the registries' modules, pydantic's and ANTLR's tables, Hydra's plugins.
"""

from lightning_llm.config.compose import compose_config
from lightning_llm.plan.check import check_config

check_config(compose_config(["callbacks=none", "logger=none"]))
