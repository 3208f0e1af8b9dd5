"""Credentials of an address are in nothing that a run prints or writes, and in what talks to the server. 15 seconds."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.config.from_file import load_config
from lightning_llm.config.redact import WHOLE_URIS_VARIABLE, redact_uri, with_credentials
from lightning_llm.config.sweep_space import compose_sweep
from lightning_llm.run import fit as run
from lightning_llm.tracking.mlflow.tracker import MLflowTracker, tracking_uri
from lightning_llm.tracking.sweep_definition import SweepSource, command_with_seeds, define, write_sweep

URI = "http://someone:s3cret@127.0.0.1:9"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (WHOLE_URIS_VARIABLE, "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "")


@pytest.mark.parametrize(
    ("given_text", "clean"),
    [
        (URI, "http://127.0.0.1:9"),
        ("https://u:p%40ss@host/path?x=1", "https://host/path?x=1"),
        ("postgresql://u:p@ss@db:5432/mlflow?password=a&sslmode=on", "postgresql://db:5432/mlflow?sslmode=on"),
        ("https://host/?api_key=abc", "https://host/"),
        ("https://host/api?page=2&token=abc", "https://host/api?page=2"),
        (f"failed: API request to {URI}/api/2.0 failed", "failed: API request to http://127.0.0.1:9/api/2.0 failed"),
        (r"logger.tracking_uri=http\://u\:p@host\:9", r"logger.tracking_uri=http\://host\:9"),
        (f"logger.tracking_uri='{URI}'", "logger.tracking_uri='http://127.0.0.1:9'"),
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
        ("https://host/a@b", "https://host/a@b"),
        ("http://bob:hun?ter2@127.0.0.1:9/x", "http://127.0.0.1:9/x"),
        ("postgresql://bob:h#unter2@127.0.0.1:9/db", "postgresql://127.0.0.1:9/db"),
        ("http://bob:12/hunter2@127.0.0.1:9", "http://127.0.0.1:9"),
        ("http://127.0.0.1:9/x?access_token=hunter2", "http://127.0.0.1:9/x"),
        ("http://127.0.0.1:9/x?a=1&client_secret=hunter2", "http://127.0.0.1:9/x?a=1"),
        ("mail me@home", "mail me@home"),
    ],
)
def test_only_credentials_are_removed_from_uris(given_text: str, clean: str) -> None:
    assert redact_uri(given_text) == clean
    assert redact_uri(clean) == clean


word = st.text("abcXYZ019._~-!$*+,;=", min_size=1)


@settings(max_examples=30)
@given(user=word, password=st.text("abcXYZ019._~-!$*+,;=@:%", min_size=1), host=st.text("az09.", min_size=1))
def test_no_password_survives(user: str, password: str, host: str) -> None:
    assert redact_uri(f"see https://{user}:{password}@{host}:80/x now") == f"see https://{host}:80/x now"


def files_with(secret: str, root: Path) -> list[Path]:
    return [file for file in root.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()]


@pytest.mark.usefixtures("empty_store")
def test_a_run_writes_and_prints_no_password(
    tmp_path: Path, small_run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "MLflowTracker", partial(MLflowTracker, close_seconds=0.1))
    words = [*small_run(tmp_path, "trainer.max_steps=2"), "logger=mlflow", f"logger.tracking_uri={URI}"]
    told = io.StringIO()
    with redirect_stdout(told), redirect_stderr(told):
        assert main(["train", *words]) == 0
        assert main(["train", *words]) == 2  # the folder is taken
    said = told.getvalue() + caplog.text
    assert "s3cret" not in said
    assert "the password in logger.tracking_uri is not saved" in said
    assert "curves http://127.0.0.1:9/#/experiments?workflowType=machine_learning" in said
    assert (tmp_path / "run" / "checkpoints" / "step=2").is_dir()
    assert files_with("s3cret", tmp_path) == []
    again = load_config(tmp_path / "run" / "config.yaml", [])
    assert again.logger.tracking_uri == "http://127.0.0.1:9"
    assert tracking_uri(again) == URI  # in this process and its children alone
    monkeypatch.delenv(WHOLE_URIS_VARIABLE)
    assert tracking_uri(again) == "http://127.0.0.1:9"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URI)
    assert tracking_uri(again) == URI


def test_a_sweep_writes_no_password(tmp_path: Path) -> None:
    words = [f"run.root={tmp_path}", "seed=0,1", f"logger.tracking_uri={URI},{URI}/other"]
    sweep = define(compose_sweep(words), None, SweepSource(tuple(words)))
    write_sweep(sweep)
    assert files_with("s3cret", tmp_path) == []
    assert "s3cret" not in json.dumps([job.config.model_dump() for job in sweep.jobs])
    assert "logger.tracking_uri=http://127.0.0.1:9" in command_with_seeds(sweep.folder, [0])
    other = compose_config([f"run.root={tmp_path}", "logger.tracking_uri=http://elsewhere"])
    assert with_credentials(str(other.logger.tracking_uri)) == "http://elsewhere"
    assert {tracking_uri(job.config) for job in sweep.jobs} == {URI, f"{URI}/other"}  # each job has its own
