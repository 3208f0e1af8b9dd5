"""`diff` of two runs."""

import json

from lightning_llm.__main__ import main
from tests.compare.run_folders import make_run


def test_diff_prints_the_differences_of_two_runs(tmp_path, capsys, monkeypatch):
    one = make_run(tmp_path / "one", "precision=bf16", "optim.eps=1e-8")
    other = make_run(tmp_path / "other", "precision=bf16", "optim.eps=1e-6", summary={"device": "NVIDIA H100, 80 GiB"})
    assert main(["diff", "--json", str(one), str(other)]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "optim.eps": [1e-8, 1e-6], "device": ["AMD EPYC", "NVIDIA H100"],
    }  # fmt: skip
    assert main(["diff", str(one), str(other)]) == 0
    assert "optim.eps  1e-08 | 1e-06" in capsys.readouterr().out
    assert main(["diff", str(one), str(one)]) == 0
    assert "no difference" in capsys.readouterr().out
    assert main(["diff", str(one), str(tmp_path)]) == 2
    assert "contains 2 runs, must be one" in capsys.readouterr().err
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path / "outputs"))
    for number in (0, 1):
        make_run(tmp_path / "outputs" / "study" / "20261121-170000" / str(number), f"seed={number}")
    assert main(["diff", "20261121-170000/0", "20261121-170000/1"]) == 0  # as verdicts and `diff` call them
    assert "seed  0 | 1" in capsys.readouterr().out
    make_run(tmp_path / "outputs" / "other" / "20261121-170000" / "0", "seed=0")
    assert main(["diff", "20261121-170000/0", "study"]) == 2
    wanted = "is the name of 2 folders. Use one of: other/20261121-170000/0, study/20261121-170000/0."
    assert wanted in capsys.readouterr().err
