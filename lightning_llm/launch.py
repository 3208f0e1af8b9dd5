"""The verb `train`: compose, check, run. Nothing heavy is imported before the checks are through."""

import argparse

from lightning_llm.check import check_config, check_disk
from lightning_llm.compose import compose_config, load_config
from lightning_llm.run_state import decide_start
from lightning_llm.sweep import sweep


def train(arguments: argparse.Namespace) -> int:
    """Train one run, or with -m one for each combination; return the exit code."""
    if arguments.multirun:
        return sweep(arguments)
    if arguments.config:
        config = load_config(arguments.config, arguments.overrides)
    else:
        config = compose_config(arguments.overrides, arguments.config_dir)
    check_config(config)
    check_disk(config)
    start = decide_start(config)
    if start.finished:
        print(f"{config.run.dir} is finished at step {start.step}; raise trainer.max_steps to go on")
        return 0
    from lightning_llm.run import run  # torch and Lightning: seconds

    return run(config, start)
