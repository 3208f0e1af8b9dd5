"""An override on its way from the command line to the `Config` enters each module of `lightning_llm.config` once."""

import sys
from pathlib import Path
from types import FrameType

import pytest

import lightning_llm.config
from lightning_llm.config.compose import compose_config

FOLDER = Path(lightning_llm.config.__file__).parent


def module_of(frame: FrameType) -> str | None:
    """Return the module in `config/` that `frame` runs; None for the schema, which others ask for types all along."""
    file = Path(frame.f_code.co_filename)
    return file.stem if file.parent == FOLDER else None


def entered(overrides: list[str]) -> list[str]:
    """Return the modules in the order in which calls enter them; one with a frame on the stack has not been left."""
    found: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        module = module_of(frame)
        if event != "call" or module is None or frame.f_code.co_flags & 0x20:  # of generators the end is no return
            return
        above, on_stack = frame.f_back, set()
        while above is not None:
            on_stack.add(module_of(above))
            above = above.f_back
        if module not in on_stack and found[-1:] != [module]:
            found.append(module)

    compose_config(overrides)  # files are read on the first composition
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        compose_config(overrides)
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize(
    "overrides", [["optim.learning_rate=1e-3"], ["precision=mxfp8", "callbacks.sample=null"], ["recipe=quickstart"]]
)
def test_an_override_passes_each_module_once(overrides: list[str]) -> None:
    modules = entered(overrides)
    assert modules[0] == "compose"
    assert {"overrides", "sources", "derived_keys", "resolve"} <= set(modules)
    assert len(modules) == len(set(modules)), " > ".join(modules)
