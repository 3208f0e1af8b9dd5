"""A second process that compiles what a run has yet to come to, where the first cast of a run has to be compiled.

Of processes that need a kernel one compiles it, and the others go on to the next (`precision.kernel_cache`): two cores
share what a run on one device would otherwise compile in turn.
"""

import os
import subprocess
import sys
from functools import partial

from lightning_llm.config.config_dir import config_dir_arguments
from lightning_llm.config.schema import Config
from lightning_llm.precision import kernel_cache
from lightning_llm.record.state import is_among_jobs


def compile_ahead(config: Config) -> None:
    """Have `warm` help with the first kernel of the run `config` that is not there. Its config.yaml is.

    Not beside other ranks or jobs, which have the other cores and share the work themselves.
    """
    alone = config.trainer.devices == 1 and config.world in (None, 1) and not is_among_jobs()
    if alone and len(os.sched_getaffinity(0)) > 1:
        kernel_cache.before_compiling = partial(_start, config.run.dir)


def _start(run_dir: str) -> None:
    words = ["warm", "--config", f"{run_dir}/config.yaml", *config_dir_arguments(), "--device=cpu"]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen([sys.executable, "-m", "lightning_llm", *words], **quiet)  # it ends when all kernels are there
