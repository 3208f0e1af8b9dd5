"""A plan on its way from `train` to the first step enters each module of `lightning_llm.run` once."""

import sys
from pathlib import Path
from types import FrameType

import pytest

import lightning_llm.run.checked_plan
import lightning_llm.run.rank  # imported first, since code that runs at import is not part of the path
from lightning_llm.__main__ import main
from lightning_llm.train.step import TrainStep

FOLDER = Path(lightning_llm.run.__file__).parent


class Reached(BaseException):
    """The first step begins."""


def module_of(frame: FrameType) -> str | None:
    """Return the module in `run/` that `frame` runs; None for launch/ and resume/, which phases ask along the way."""
    file = Path(frame.f_code.co_filename)
    return file.stem if file.parent == FOLDER else None


def test_a_plan_never_returns_to_a_module_that_it_has_left(small_run, tmp_path, monkeypatch) -> None:
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

    def first_step(*_: object) -> None:
        sys.setprofile(None)
        raise Reached

    monkeypatch.setattr(TrainStep, "__call__", first_step)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        with pytest.raises(Reached):
            main(["train", *small_run(tmp_path)])
    finally:
        sys.setprofile(before)
    phases = ["opening", "inputs", "agreement", "fit"]
    assert [each for each in found if each in phases] == phases, " > ".join(found)
    assert len(found) == len(set(found)), " > ".join(found)
