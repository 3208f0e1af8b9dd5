"""Shell completion: argcomplete handles the shells, this module completes overrides."""

import argparse
import os
from typing import Any

from lightning_llm.config.recipes import group_names, option_files

SHELLS = ("bash", "zsh", "fish")


def answer_shell(parser: argparse.ArgumentParser) -> None:
    """If a shell asks for completions (argcomplete's variable is set), print them and exit. Call it first of all."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser, always_complete_options=False, append_space=False)


def completion(arguments: argparse.Namespace) -> int:
    """Print the script for a shell's startup file to evaluate; return 0."""
    import argcomplete

    print(argcomplete.shellcode(["lightning-llm"], shell=arguments.shell))
    return 0


def complete_override(prefix: str, parsed_args: argparse.Namespace, **_more: Any) -> list[str]:
    """Return completions of `prefix`, the beginning of an override: keys (one level at a time), or values after "="."""
    key, equals, value = prefix.partition("=")
    sign = key[: len(key) - len(key.lstrip("+~"))]
    config_dir = getattr(parsed_args, "config_dir", None)
    name = key.lstrip("+~")
    if not equals:
        return [f"{sign}{each}" for each in _keys(name)]
    known = list(option_files(name, config_dir)) if name in group_names() else _values(name)
    *before, _last = value.split(",")  # several values make a sweep
    typed = "".join(f"{each}," for each in before)
    return [f"{key}={typed}{each}" for each in known if each not in before]


def complete_group(prefix: str, **_: Any) -> list[str]:
    """Return the names of all config groups, for the value of `config --group`."""
    return group_names()


def _keys(prefix: str) -> list[str]:
    """Return "group=", "group." and "key=" at the level of `prefix`."""
    from lightning_llm.config.schema.declared_types import fields_at

    *above, _ = prefix.split(".")
    path = "".join(f"{each}." for each in above)
    groups = [] if above else [f"{group}=" for group in group_names()]
    return [*groups, *(f"{path}{name}{'.' if below else '='}" for name, below in fields_at(above).items())]


def _values(key: str) -> list[str]:
    from lightning_llm.config.schema.declared_types import choices_at

    return choices_at(key)
