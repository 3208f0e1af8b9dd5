"""docs/tutorials/notebook.ipynb runs from its first cell to its last, with the results that it states. 8 seconds."""

import json
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorials" / "notebook.ipynb"


@pytest.fixture(scope="module")
def notebook() -> dict:
    return json.loads(NOTEBOOK.read_text(encoding="utf-8"))


def test_it_is_kept_as_jupyter_reads_it_without_outputs(notebook):
    """Format 4.5 (https://nbformat.readthedocs.io/en/latest/format_description.html)."""
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        assert cell["cell_type"] in ("code", "markdown")
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


@pytest.mark.full
def test_it_runs(notebook, tmp_path, monkeypatch, capsys):
    """As a script: a kernel would be another interpreter, which imports torch for as long as all of this takes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path / "outputs"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names: dict = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{NOTEBOOK.name} {cell['id']}", "exec"), names)
    printed = capsys.readouterr().out
    assert "model.hiden_size: unknown key. Did you mean 'hidden_size'?" in printed
    assert "trainer.max_steps='ten': must be a valid integer." in printed
    assert {name: run.summary["status"] for name, run in names["runs"].items()} == {
        "bf16": "finished",
        "mxfp8": "finished",
    }
    assert names["written"].shape[1] == names["prompt"].shape[1] + 16
    assert names["evaluation"].values["val_loss"] == names["runs"]["mxfp8"].records[-1]["val_loss"]
    (verdict,) = names["comparison"].verdicts
    assert (verdict.name, verdict.decision) == ("mxfp8", "inconclusive")
    assert not (tmp_path / "outputs").exists()
