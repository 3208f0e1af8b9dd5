"""docs/first_question.md: its commands run in order on its own data, with a small model and two seeds. 30 seconds."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_llm.__main__ import main
from lightning_llm.sweep import launchers as local
from tests.sweep.forked_jobs import ForkedJob

PAGE = Path(__file__).parents[2] / "docs" / "first_question.md"
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
SMALL = [
    "model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=1",
    "model.ffn_hidden_size=64", "model.vocab_size=320", "data.tokenizer.kind=bytes", "data.tokenizer.vocab_size=null",
    "data.sequence_length=32", "trainer.max_steps=4", "trainer.validate_every_steps=2", "data.validation.sequences=4",
    "schedule.warmup_steps=1", "precision.casts=eager", "launcher.at_once=1",
]  # fmt: skip


def commands() -> list[list[str]]:
    blocks = [block.replace("\\\n", " ") for language, block in BLOCKS if language == "sh"]
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]


@pytest.mark.usefixtures("undrawn")
def test_the_commands_lead_from_text_to_a_verdict(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setattr(local, "subprocess", SimpleNamespace(Popen=ForkedJob))
    (python,) = (block for language, block in BLOCKS if language == "python")
    exec(compile(python, PAGE.name, "exec"), {})
    assert len((tmp_path / "my.jsonl").read_text().splitlines()) > 100
    printed = {}
    for program, verb, *words in commands():
        assert program == "lightning-llm"
        composes = verb in ("plan", "train")
        words = [word.replace("seed=0,1,2,3", "seed=0,1") for word in words]
        assert main([verb, *words, *(SMALL if composes else [])]) == 0
        printed[verb] = capfd.readouterr().out
    assert list(printed) == ["plan", "train", "compare"]
    assert "jobs                  6 (numbered from 0; local, 1 at once): 6 new" in printed["plan"]
    assert "6 of 6 jobs finished" in printed["train"]
    assert re.search(r"^mxfp8 +(lossless|lossy|inconclusive)", printed["compare"], re.MULTILINE)


def test_both_commands_of_the_sweep_are_the_same():
    (_, _, *planned), (_, _, *trained) = commands()[:2]
    assert planned == trained
