"""Printed commands work when pasted, also from folders with blanks. 15 seconds."""

import json
import re
import shlex
import signal
from pathlib import Path

import pytest

from lightning_llm.__main__ import main
from lightning_llm.cli.command_line import _parser
from lightning_llm.config.workspace import program, resume_command, sync_command
from lightning_llm.run import fit as run
from lightning_llm.run.fit import build_trainer
from lightning_llm.tracking.mlflow.store import own_process
from lightning_llm.tracking.mlflow.ui import _port, ui_command, ui_lines
from lightning_llm.train.checkpoint.checkpointing import StoppedBySignal
from tests.run_metrics import read_metrics


def pasted(text: str) -> list[str]:
    """Return the words behind the program's name of the command that ends `text`."""
    name, *words = shlex.split(text[text.rindex(shlex.join(program("lightning-llm", "lightning_llm"))) :])
    assert Path(name).name == "lightning-llm"
    return words


@pytest.fixture(scope="module")
def finished(tmp_path_factory, small_run) -> Path:
    root = tmp_path_factory.mktemp("my runs")
    assert main(["train", *small_run(root, "trainer.max_steps=2", "schedule.name=constant")]) == 0
    return root / "run"


def test_a_finished_run_goes_further(finished: Path, capsys: pytest.CaptureFixture) -> None:
    capsys.readouterr()
    assert main(pasted(resume_command(finished))) == 0
    told = capsys.readouterr().out
    assert f"{finished} is finished at step 2; to double its steps: " in told
    assert main(pasted(told)) == 0
    assert [each["step"] for each in read_metrics(finished) if "loss" in each] == [1, 2, 3, 4]


def test_a_run_that_ended_early_goes_on(tmp_path: Path, small_run, capsys, monkeypatch) -> None:
    words = small_run(tmp_path / "two words", "optim.gradient_clip_norm=null", "optim.learning_rate=1e30")
    assert main(["train", *words]) == 1
    told = capsys.readouterr().err
    hint = told.splitlines()[-1]
    assert hint.startswith("to resume: ") == any((tmp_path / "two words" / "run" / "checkpoints").glob("step=*"))
    assert "spikes.policy=skip leaves such updates out" in told
    assert main(pasted(hint)) == 1  # it diverges again, in its own folder
    summary = json.loads((tmp_path / "two words" / "run" / "summary.json").read_text())
    assert summary["starts"] == 2

    def stopped(*_: object) -> None:
        raise StoppedBySignal(signal.SIGINT, None)

    def build(*arguments: object, **keywords: object) -> object:
        trainer = build_trainer(*arguments, **keywords)
        trainer.fit = stopped
        return trainer

    with monkeypatch.context() as patch:
        patch.setattr(run, "build_trainer", build)
        assert main(["train", *small_run(tmp_path / "again", "trainer.max_steps=1")]) == 130
    told = capsys.readouterr().err
    assert "stopped by SIGINT, nothing was saved yet; to start it again: " in told
    assert main(pasted(told)) == 0


def test_commands_about_mlflow_are_quoted_and_name_the_right_database(tmp_path: Path) -> None:
    arguments = _parser().parse_args(pasted(sync_command(tmp_path / "a b")))
    assert (arguments.verb, arguments.folders) == ("sync", [str(tmp_path / "a b")])
    import click
    from mlflow.cli import cli

    command = shlex.split(ui_command(f"sqlite:///{tmp_path}/a b/mlflow.db"))
    assert Path(command[0]).name == "mlflow"
    _, verb, options = cli.resolve_command(click.Context(cli), command[1:])
    context = verb.make_context("ui", options)
    assert context.params["backend_store_uri"] == f"sqlite:///{tmp_path}/a b/mlflow.db"
    lines = ui_lines(f"sqlite:///{tmp_path}/a b/mlflow.db", "7")
    assert lines[1].endswith("http://localhost:5000/#/experiments/7?workflowType=machine_learning")
    assert ui_lines("https://u:p@host/", "7") == ["curves https://host/#/experiments/7?workflowType=machine_learning"]


def test_a_program_that_path_does_not_find_is_named_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = Path(own_process("x")[0][0]).parent
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program("lightning-llm", "lightning_llm") == [str(here / "lightning-llm")]
    monkeypatch.setenv("PATH", f"{here}:{tmp_path}")
    assert program("lightning-llm", "lightning_llm") == ["lightning-llm"]
    assert program("no-such-program", "module") == [str(own_process("x")[0][0]), "-P", "-m", "module"]


def test_mlflows_page_of_runs_is_where_the_link_points() -> None:
    """The installed MLflow's own pages: the route, and the word that opens the runs instead of the agents' overview."""
    import mlflow

    (page,) = (Path(mlflow.__file__).parent / "server" / "js" / "build" / "static" / "js").glob("main.*.js")
    text = page.read_text(encoding="utf-8")
    assert "/experiments/:experimentId" in text
    assert re.search(r'MACHINE_LEARNING\s*=\s*"machine_learning"', text)
    assert '"workflowType"' in text


@pytest.mark.parametrize(
    ("arguments", "port"), [([], "5000"), (["--port", "5077"], "5077"), (["-p=9"], "9"), (["--host", "::"], "5000")]
)
def test_make_ui_knows_the_port_that_it_opens(arguments, port):
    assert _port(arguments) == port
