"""Verdicts in MLflow: on each run, on the sweep's parent, and not at all where MLflow is away. 10 seconds."""

import json
import shutil
import uuid
from urllib.parse import parse_qs, urlsplit

import pytest
from mlflow import MlflowClient
from mlflow.entities import RunTag

from lightning_llm.__main__ import main
from lightning_llm.compare import tracking
from lightning_llm.compare.judge import compare_runs
from lightning_llm.compare.terms import Terms
from lightning_llm.compare.tracking import BEGIN, END, described, log_verdicts
from lightning_llm.config.workspace import sync_command
from lightning_llm.tracking.mlflow.store import LARGEST_VALUE
from lightning_llm.tracking.reading import read_run
from tests.compare.run_folders import make_run

pytestmark = pytest.mark.usefixtures("undrawn")


@pytest.fixture(scope="module")
def tracked(tmp_path_factory, empty_store):
    """(client, parent's id, sweep's folder, ids of the children): bf16 and mxfp8 at two seeds, in a database."""
    root = tmp_path_factory.mktemp("outputs")
    uri = f"sqlite:///{shutil.copy(empty_store, root / 'mlflow.db')}"
    client = MlflowClient(uri)
    experiment = client.create_experiment("exp", artifact_location=(root / "artifacts").as_uri())
    parent = client.create_run(experiment).info.run_id
    ids = []
    for number in range(4):
        folder = root / "exp" / "sweep" / str(number)
        tags = {"mlflow.parentRunId": parent, "run_dir": str(folder)}
        ids.append(client.create_run(experiment, tags=tags).info.run_id)
        summary = {"mlflow_run_id": ids[-1], "mlflow": {"tracking_uri": uri}}
        words = (f"precision={('bf16', 'mxfp8')[number // 2]}", f"seed={number % 2}", f"run.root={root}")
        make_run(folder, *words, gap=0.05 * (number // 2), noise=0.0001 * number**2, summary=summary)
    return client, parent, root / "exp" / "sweep", ids


def test_each_run_and_the_parent_get_the_verdict(tracked, capsys):
    client, parent, sweep, ids = tracked
    client.set_tag(parent, "mlflow.note.content", "somebody's words")
    assert main(["compare", str(sweep)]) == 0
    assert main(["compare", str(sweep)]) == 0
    out = capsys.readouterr().out
    assert "logged to MLflow: 2 runs, 1 sweep" in out
    page = f"http://localhost:5000/#/experiments/{client.get_run(parent).info.experiment_id}/runs/{parent}/artifacts"
    assert f"       {page}/compare/report.html?workflowType=machine_learning" in out
    for run_id in ids[2:]:
        data = client.get_run(run_id).data
        assert data.tags["verdict"] == "lossy"
        assert data.metrics["final/val_loss_gap"] == pytest.approx(0.049, abs=0.002)
        assert data.tags["verdict.baseline_run_id"] in ids[:2]
    tags = client.get_run(parent).data.tags
    assert tags["verdict/mxfp8"].startswith("mxfp8 at 2.16M parameters")
    note = tags["mlflow.note.content"]
    first, second = note.partition(BEGIN)[2].strip().split("\n\n")[:2]
    assert first == "**lossy**: mxfp8 (against bf16, margin 0.01)."
    assert note.startswith(BEGIN)
    assert note.endswith("\n\nsomebody's words")  # which stay, while the table is made anew
    link = urlsplit(second.partition("](#")[2].rstrip(")"))
    experiment = client.get_run(parent).info.experiment_id
    assert link.path == f"/experiments/{experiment}/runs"
    query = parse_qs(link.query)
    assert query["compareRunsMode"] == ["CHART"]
    shown = client.search_runs([experiment], query["searchFilter"][0])  # the filter is one that MLflow reads
    assert {run.info.run_id for run in shown} == set(ids)
    assert note.count("| mxfp8 | **lossy**") == 1
    assert note.count(tags["verdict/mxfp8"]) == 1
    assert {each.path for each in client.list_artifacts(parent, "compare")} == {
        "compare/compare.json", "compare/report.html", "compare/report.tex",
        "compare/verdicts.csv", "compare/curves.csv", "compare/verdicts.tex", "compare/methods.tex",
        "compare/sources.tex", "compare/references.bib", "compare/figure-gaps.svg", "compare/figure-curve-mxfp8.svg",
        "compare/figure-loss.svg", "compare/figure-speed.svg",
    }  # fmt: skip
    assert "`compare/report.html` opens there" in note


def test_user_text_in_an_mlflow_description_is_kept():
    first = described("before", "| old |")
    assert first == f"{BEGIN}\n| old |\n{END}\n\nbefore"
    assert described(first + " after", "| new |") == f"{BEGIN}\n| new |\n{END}\n\nbefore after"
    earlier = f"before\n\n{BEGIN}\n| old |\n{END}\n\nafter"  # as earlier versions wrote it
    assert described(earlier, "| new |") == f"{BEGIN}\n| new |\n{END}\n\nbefore\n\nafter"
    assert described("", "| new |") == f"{BEGIN}\n| new |\n{END}"
    assert len(described("x" * 100, "long" * 5000)) <= LARGEST_VALUE["tags"]


def test_runs_are_found_by_their_ids_and_by_their_parents(tracked, capsys, monkeypatch, tmp_path):
    client, parent, sweep, ids = tracked
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(sweep.parents[1]))
    assert main(["compare", "--json", parent, "--output", str(tmp_path)]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 4
    assert main(["diff", "--json", ids[0], ids[1]]) == 0
    assert json.loads(capsys.readouterr().out) == {"seed": [0, 1]}
    stray = make_run(sweep / "9", "precision=mxfp8", "seed=1", "optim.eps=1e-6", f"run.root={sweep.parents[1]}")
    client.set_tag(parent, "sweep_folder", str(sweep))  # all of its jobs count, also those that MLflow never saw
    assert main(["compare", "--json", parent, "--output", str(tmp_path)]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 5
    shutil.rmtree(stray)
    gone = client.create_run(client.get_run(parent).info.experiment_id).info.run_id
    client.log_batch(gone, tags=[RunTag("run_dir", "/nowhere/at/all")])
    assert main(["compare", gone, ids[0]]) == 2
    assert "its folder /nowhere/at/all is missing or on another machine" in capsys.readouterr().err
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{sweep.parents[1] / 'mlflow.db'}")
    assert main(["compare", "exp"]) == 2  # also reported for all of them
    assert "its folder /nowhere/at/all is missing" in capsys.readouterr().err
    client.delete_run(gone)
    assert main(["compare", uuid.uuid4().hex]) == 2
    assert "could not be asked for this run" in capsys.readouterr().err


def test_an_experiment_that_mlflow_alone_knows_is_found_by_its_name(tracked, capsys, monkeypatch, tmp_path):
    _, _, sweep, _ = tracked
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{sweep.parents[1] / 'mlflow.db'}")
    assert main(["compare", "--json", "exp"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 4
    assert main(["compare", "exq"]) == 2
    assert "no experiment or sweep in" in capsys.readouterr().err


def test_mlflow_being_away_changes_nothing_but_a_note(tracked, capsys, tmp_path):
    _, _, sweep, _ = tracked
    copy = shutil.copytree(sweep, tmp_path / "sweep")
    for file in copy.glob("*/summary.json"):
        summary = json.loads(file.read_text())
        summary["mlflow"]["tracking_uri"] = "http://127.0.0.1:9"
        file.write_text(json.dumps(summary))
    assert main(["compare", str(copy)]) == 0
    assert "the verdicts were not logged to MLflow" in capsys.readouterr().out
    assert (copy / "compare" / "report.html").exists()


def test_runs_that_mlflow_lacks_are_counted_and_their_verdicts_stand_in_the_parent(tracked, tmp_path):
    client, parent, sweep, _ = tracked
    outputs = tmp_path / "exp" / "sweep"
    shutil.copytree(sweep, outputs, ignore=shutil.ignore_patterns("compare"))
    for number, seed in ((4, 0), (5, 1)):
        about = {"mlflow": {"tracking_uri": "", "synced": False}}
        words = ("precision=fp8_current", f"seed={seed}", f"run.root={sweep.parents[1]}")
        make_run(outputs / str(number), *words, gap=0.2, noise=0.0002 * seed, summary=about)
    (outputs / "sweep.json").write_text(json.dumps({"mlflow_run_id": parent, "jobs": []}))
    said = log_verdicts(compare_runs([read_run(outputs / str(number)) for number in range(6)], Terms()), tmp_path)
    assert said.startswith("logged to MLflow: 2 runs, 1 sweep\n")
    assert said.endswith(f"\nnote   4 of 6 runs in MLflow; the rest: {sync_command(outputs)}")
    note = client.get_run(parent).data.tags["mlflow.note.content"]
    assert ("| mxfp8 | **lossy**" in note, "| fp8_current | **lossy**" in note) == (True, True)
    client.set_tag(parent, "mlflow.note.content", "")
    alone = compare_runs([read_run(outputs / str(number)) for number in (0, 1, 4, 5)], Terms())
    said = log_verdicts(alone, tmp_path)  # of no run of theirs does MLflow know whose it is
    assert said.startswith("logged to MLflow: 0 runs, 1 sweep\n")
    assert "| fp8_current | **lossy**" in client.get_run(parent).data.tags["mlflow.note.content"]


def test_a_ladder_report_has_a_separate_place_and_tags(tracked, tmp_path):
    """As `compare --ladder` logs its own."""
    client, parent, sweep, _ = tracked
    comparison = compare_runs([read_run(sweep / str(number)) for number in range(4)], Terms())
    (tmp_path / "ladder.csv").write_text("recipe\n")
    line = "mxfp8: 4.1 % more tokens [2.0, 6.5] at 1B / 20B"
    said = log_verdicts(comparison, tmp_path, "compare/ladder", {"ladder/mxfp8": line})
    assert "artifacts/compare/ladder/report.html" in said
    assert client.get_run(parent).data.tags["ladder/mxfp8"] == line
    assert [each.path for each in client.list_artifacts(parent, "compare/ladder")] == ["compare/ladder/ladder.csv"]


def test_mlflow_errors_are_redacted(tracked, tmp_path, monkeypatch):
    def fails(uri):
        raise OSError("denied to https://me:hunter2@host with swordfish-swordfish")

    monkeypatch.setenv("SOME_API_TOKEN", "swordfish-swordfish")
    monkeypatch.setattr(tracking, "existing_store", fails)
    comparison = compare_runs([read_run(tracked[2] / str(number)) for number in range(4)], Terms())
    said = log_verdicts(comparison, tmp_path)
    assert "denied to https://host with $SOME_API_TOKEN" in said
