"""Options that several verbs have in common."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from lightning_llm.cli import completion


def add_composition(parser: ArgumentParser) -> None:
    """Add what a config is composed of: overrides, or a file."""
    overrides: Any = parser.add_argument("overrides", nargs="*", help="Hydra overrides: key=value, group=name, ~key")
    overrides.completer = completion.complete_override
    parser.add_argument("--config", type=Path, metavar="FILE", help="repeat a run from its config.yaml")


def add_config_dir(parser: ArgumentParser) -> None:
    """Add a user's folder of config groups and callbacks."""
    text = "further config groups, DIR/recipe/mine.yaml, and callbacks, DIR/callbacks/mine.py"
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help=text)


def add_multirun(parser: ArgumentParser) -> None:
    """Add the switch for one run per combination."""
    parser.add_argument("-m", "--multirun", action="store_true", help="one run for each combination of a=1,2")


def add_weights_output(parser: ArgumentParser) -> None:
    """Add the folder that weights are written into."""
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="the folder to make; there whole, or not at all")
    add("--force", action="store_true", help="replace DIR if it holds weights already")
    add("--no-parity", action="store_true", help="leave out the comparison of logits with transformers")


def add_device(parser: ArgumentParser) -> None:
    """Add the device to compute on."""
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
