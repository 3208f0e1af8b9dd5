"""The verb `recipes`: list the presets with their descriptions."""

import argparse
import json

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.recipes import describe, folder_problems, recipe_files


def recipes(arguments: argparse.Namespace) -> int:
    """Print the shipped presets and those of --config-dir, one line each; return 0."""
    if arguments.config_dir is not None and (problems := folder_problems(arguments.config_dir)):
        raise ConfigError(problems)
    catalog = {name: describe(file) for name, file in recipe_files(arguments.config_dir)}
    if arguments.json:
        print(json.dumps(catalog, indent=1))
        return 0
    width = max(map(len, catalog))
    for name, text in catalog.items():
        print(f"{name:<{width}}  {text}".rstrip())
    return 0
