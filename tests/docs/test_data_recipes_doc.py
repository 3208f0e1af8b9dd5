"""docs/howto/data_recipes.md refers to jobs of a sweep by number: they have the settings that it names."""

import json
import re
import shlex
from pathlib import Path

from lightning_llm.__main__ import main
from lightning_llm.cli.command_line import _parser
from lightning_llm.config.sweep_space import compose_sweep

TEXT = (Path(__file__).parents[2] / "docs" / "howto" / "data_recipes.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]


def numbers_in(command: str) -> list[int]:
    return [int(number) for number in re.findall(r"data_constrained/decay/(\d)", command)]


def test_members_of_the_ensemble_and_teachers_are_alike_and_students_differ_in_distil_alone(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path))
    sweep = shlex.split(next(each for each in COMMANDS if "run.name=decay" in each), comments=True)[2:]
    assert main(["plan", *sweep, "--json"]) == 0
    decay = {
        job["number"]: next(word.partition("=")[2] for word in job["words"] if word.startswith("optim.weight_decay="))
        for job in json.loads(capsys.readouterr().out)["jobs"]
    }
    ensemble, distil, judge = (
        next(each for each in COMMANDS if word in each) for word in ("--ensemble", "sweep/distil", "distil/students")
    )
    assert [decay[number] for number in numbers_in(ensemble)] == ["0.1"] * 3
    assert numbers_in(judge) == numbers_in(distil) == [1, 3, 5]
    assert {decay[number] for number in numbers_in(distil)} == {"1.6"}
    words = _parser().parse_args(shlex.split(distil)[1:]).overrides
    students = [config for _, config in compose_sweep(words)]
    assert {config.optim.weight_decay for config in students} == {1.6}
    assert sorted({config.seed for config in students}) == [0, 1, 2]
