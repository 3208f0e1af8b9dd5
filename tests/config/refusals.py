"""A command line that is refused: exit 2, a line per problem, nothing made."""

from pathlib import Path

import pytest

from lightning_llm.__main__ import main


def refused(capsys, folder: Path, *words: str) -> str:
    """Run `words`; return stderr, which must be a count and one line per problem."""
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    try:
        code = main([str(word) for word in words])
    except SystemExit as stop:  # argparse
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    lines = err.splitlines()
    assert lines[0].startswith("error: ")
    if lines[1:]:
        assert int(lines[0].split()[1]) == len(lines) - 1
        assert all(line.startswith("  - ") for line in lines[1:])
    assert sorted(folder.rglob("*")) == before
    return err


@pytest.fixture(autouse=True)
def outputs(tmp_path, monkeypatch):
    folder = tmp_path / "outputs"
    folder.mkdir()
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(folder))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return folder
