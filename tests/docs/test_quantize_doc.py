"""The code of docs/howto/quantize_any_model.md runs, and its report is printed."""

import re
from pathlib import Path

import pytest

from lightning_llm.precision.any_module import quantize as module
from tests.precision.recipes import load

TEXT = (Path(__file__).parents[2] / "docs" / "howto" / "quantize_any_model.md").read_text(encoding="utf-8")


def test_the_code_runs_and_prints_the_report(capsys, monkeypatch):
    read = module.read_recipe
    eager = {"casts": "eager"}  # the same bits, without compiling
    monkeypatch.setattr(module, "read_recipe", lambda name: read(load(name).model_copy(update=eager)))
    codes = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (printed,) = re.findall(r"```\n(mxfp4_sr quantizes.*?)```", TEXT, re.DOTALL)
    names = {}
    exec(codes[0], names)
    exec(codes[2], names)
    exec(codes[3], names)
    out = capsys.readouterr().out
    for line in printed.splitlines():
        reason = "emulated" if "emulated" in line else line
        assert reason.strip() == "..." or reason in out
    assert names["figures"]["layers.1.linear1", "dgrad.dy"]["sqnr_db"] == pytest.approx(17, abs=3)
    assert set(names["found"].keep) < set(names["report"].quantized)
