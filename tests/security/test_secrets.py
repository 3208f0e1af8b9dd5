"""Secrets of the environment and of addresses are in nothing that a run prints or leaves; modes follow the umask."""

import os
import sqlite3
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.config.redact import redacted, secret_in
from lightning_llm.config.run_paths import secret_problems
from lightning_llm.model.weights.write import TensorToWrite, write_tensors
from lightning_llm.run import fit
from lightning_llm.tracking.files import summary_of
from lightning_llm.tracking.mlflow.tracker import MLflowTracker

CANARY = "c4nary0f"
SECRETS = (
    "WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "OPENAI_API_KEY", "GITHUB_TOKEN",
    "SLACK_WEBHOOK_URL", "DB_PASSWORD", "CANARY_OF_ADDRESS",
)  # fmt: skip


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, f"{CANARY}_{name.lower()}_1234")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def holding(root: Path) -> list[Path]:
    """Files that contain a canary; of a database the tables are searched, too."""
    files = [file for file in root.rglob("*") if file.is_file()]
    found = [file for file in files if CANARY.encode() in file.read_bytes()]
    for file in (each for each in files if each.suffix == ".db"):
        with sqlite3.connect(file) as database:
            found += [file] if CANARY in "\n".join(database.iterdump()) else []
    return found


def wrong_modes(root: Path, mask: int) -> dict[str, str]:
    wanted = {True: 0o777 & ~mask, False: 0o666 & ~mask}
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in root.rglob("*") if not path.is_symlink()}
    return {str(path.relative_to(root)): oct(mode) for path, mode in modes.items() if mode != wanted[path.is_dir()]}


@pytest.mark.usefixtures("secrets")
def test_a_run_that_fails_leaves_no_secret_and_modes_are_the_users(
    tmp_path: Path, small_run: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    fail_under_077(tmp_path, small_run, capfd, "logger=none")


@pytest.mark.full
@pytest.mark.usefixtures("secrets", "own_writer")
def test_a_failed_run_tracked_by_mlflow_leaves_no_secret(
    tmp_path: Path, small_run: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "MLflowTracker", partial(MLflowTracker, close_seconds=300.0))
    fail_under_077(tmp_path, small_run, capfd, "logger=mlflow")
    assert (tmp_path / "runs" / "mlflow.db").is_file()


def fail_under_077(tmp_path: Path, small_run: Any, capfd: pytest.CaptureFixture[str], logger: str) -> None:
    root = tmp_path / "runs"
    with umask(0o077):
        root.mkdir()
        more = ["trainer.max_steps=2", "checkpoint.every_steps=1", f"data.cache_dir={root}/cache", logger]
        metrics = f"{{_target_: lightning_llm.callbacks.prometheus.Prometheus, port: null, textfile: {root}}}"
        leaks = "{_target_: tests.security.secret_callbacks.Leaks}"
        watching = [f"+callbacks.prometheus={metrics}", "+callbacks.leaks=" + leaks]
        watching += [
            f"+callbacks.{name}={{_target_: lightning_llm.callbacks.{name}.{name.title()}}}" for name in ("memory",)
        ]
        assert main(["train", *small_run(root, *more, *watching)]) == 1
        said = capfd.readouterr()
    assert "RuntimeError: PUT https://127.0.0.1:9/x refused; sent Authorization: Bearer $HF_TOKEN" in said.err
    assert "$HF_TOKEN" in (root / "run" / "traceback.txt").read_text()
    assert "$HF_TOKEN" in summary_of(root / "run")["detail"]
    assert (root / "run" / "checkpoints").is_dir()
    assert list(root.glob("*.prom"))
    assert CANARY not in said.out + said.err
    assert holding(root) == []
    assert wrong_modes(root, 0o077) == {}


@pytest.mark.parametrize("mask", [0o002, 0o027, 0o077])
def test_exported_tensors_are_not_for_their_owner_alone(mask: int, tmp_path: Path) -> None:
    ones = torch.ones(2)
    with umask(mask):
        (tmp_path / "out").mkdir()
        write_tensors(
            tmp_path / "out", [TensorToWrite("a", 8, lambda: ones), TensorToWrite("b", 8, lambda: ones)], shard_bytes=8
        )
    assert len(list((tmp_path / "out").iterdir())) == 3
    assert wrong_modes(tmp_path / "out", mask) == {}


@pytest.mark.usefixtures("secrets")
def test_a_config_holds_no_secret(tmp_path: Path, small_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    interpolated = "+callbacks.own={_target_: tests.own_callbacks.Remembers, note: '${oc.env:HF_TOKEN}'}"
    typed = f"logger.tags.source=see https://me:{CANARY}@host/x"
    for verb in ("plan", "train"):
        assert main([verb, *small_run(tmp_path, interpolated, typed)]) == 2
        said = capsys.readouterr()
        assert "callbacks.own.note: has the value of $HF_TOKEN, and a config is written to the run's folder" in said.err
        assert "logger.tags.source: has a URI with a password or a token" in said.err
        assert CANARY not in said.out + said.err
    assert main(["train", "-m", *small_run(tmp_path, typed), "seed=0,1"]) == 2
    assert CANARY not in capsys.readouterr().err
    assert holding(tmp_path) == []


NAMES = ("GITHUB_PAT", "OPENAI_KEY_1", "DB_PASSWD_2", "MY_CREDENTIAL", "NPM_AUTHTOKEN", "MYSQL_PWD", "SSH_PASS", "JWT")


@pytest.mark.parametrize("name", NAMES)
def test_no_verb_prints_a_secret_before_it_refuses_it(
    name: str, tmp_path: Path, small_run: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, f"{CANARY}_1234567890\n")
    words = small_run(tmp_path, f"logger.tags.note='by ${{oc.env:{name}}}'")
    verbs = [["config"], ["config", "--diff"], ["config", "--json"], ["plan"], ["plan", "-m", "seed=0,1"]]
    for verb, *more in verbs[:: 1 if name == NAMES[0] else 2]:
        assert main([verb, *words, *more]) == 2
        said = capsys.readouterr()
        assert f"logger.tags.note: has the value of ${name}" in said.err
        assert CANARY not in said.out + said.err


def test_what_a_config_takes_from_any_variable_is_in_no_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIN_LABEL", CANARY)
    assert main(["config", "trainer.max_steps=${oc.env:PLAIN_LABEL}"]) == 2
    said = capsys.readouterr()
    assert "'$PLAIN_LABEL'" in said.err
    assert CANARY not in said.out + said.err


def test_numbers_and_tokens_that_no_variable_holds_are_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASSWORD", "1234567890")
    number = compose_config(["seed=1234567890"])
    assert [each.key for each in secret_problems(number)] == ["seed"]
    for token in ("ghp_" + 36 * "a", "github_pat_" + 30 * "b", "hf_" + 34 * "c", "sk-proj-" + 40 * "d"):
        assert secret_in(f"by {token}") == ""
        assert redacted(f"401 for {token}!") == "401 for [token]!"
    assert secret_in("task-by-the-risk-averse-and-desk-bound") is None


def test_values_that_only_look_like_secrets_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTGRES_PASSWORD", "postgres")
    monkeypatch.setenv("SORT_KEY", "constant")
    words = [
        "schedule=constant", "logger.tags.a=postgresql", "logger.tags.b='http://minio:9000/lake@v2/f.parquet'",
        "logger.tags.c='http://h/x?tokenizer=gpt2'", "logger.tags.d='http://h/x?'",
    ]  # fmt: skip
    assert list(secret_problems(compose_config(words))) == []
    assert secret_in("the postgres, that is") == "POSTGRES_PASSWORD"
    for address in ("http://h/x?access_token=a", "http://h/x?AWSAccessKeyId=a", "http://me@h/x", "http://me:b@h/x@y"):
        assert secret_in(address) == ""


@pytest.mark.usefixtures("secrets")
def test_a_secret_is_found_wherever_it_lies() -> None:
    token = os.environ["HF_TOKEN"]
    for value in ([{"Authorization": token}], [["a", {"b": [f"Bearer {token}"]}]], {token: 1}, [{token: 1}]):
        config = compose_config([]).model_copy(update={"callbacks": {"own": {"headers": value}}})
        assert ["has the value of $HF_TOKEN" in each.text for each in secret_problems(config)] == [True]


@pytest.mark.usefixtures("secrets")
def test_what_is_secret() -> None:
    token = os.environ["HF_TOKEN"]
    assert redacted(f"a {token} and s3://u:{CANARY}@h/b?x=1") == "a $HF_TOKEN and s3://h/b?x=1"
    assert (secret_in(f"x{token}"), secret_in(f"https://u:{CANARY}@h"), secret_in("https://h/a@b")) == (
        "HF_TOKEN",
        "",
        None,
    )
    os.environ["HF_TOKEN"] = "short"
    assert secret_in("short") is None


@pytest.mark.usefixtures("secrets")
def test_unexpected_exceptions_are_printed_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(words: list[str]) -> None:
        raise RuntimeError(f"sent {os.environ['HF_TOKEN']}")

    monkeypatch.setattr("lightning_llm.cli.command_line._parse", fail)
    monkeypatch.setattr("lightning_llm.__main__.take_process", lambda: None)
    monkeypatch.setattr("lightning_llm.__main__.early_signals", lambda words: nullcontext())
    monkeypatch.setattr("lightning_llm.__main__.leave_working_folder", lambda: None)
    monkeypatch.setattr(sys, "argv", ["lightning-llm", "plan"])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back afterwards
    try:
        main()
    except RuntimeError:
        sys.excepthook(*cast(Any, sys.exc_info()))
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.endswith("RuntimeError: sent $HF_TOKEN\n")


@pytest.mark.full
@pytest.mark.usefixtures("secrets", "own_writer")
@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_modes_and_secrets_of_a_sweep_and_an_export(mask: int, tmp_path: Path, small_run: Any, capfd: Any) -> None:
    root = tmp_path / "runs"
    with umask(mask):
        root.mkdir()
        more = ["trainer.max_steps=2", f"data.cache_dir={root}/cache", "logger=mlflow", "trainer.max_restarts=1"]
        more += [
            "+callbacks.sample={_target_: lightning_llm.callbacks.sample.Sample, prompt: a, max_new_tokens: 4}",
            "spikes.policy=rollback",
        ]
        words = [word for word in small_run(root, *more) if not word.startswith("run.dir=")]
        assert main(["train", "-m", *words, "seed=0,1", "run.name=swept", "launcher.at_once=2"]) == 0
        (run,) = (each.parent for each in root.rglob("0/config.yaml"))
        assert main(["export", str(run), "--output", str(root / "exported"), "--no-parity"]) == 0
        assert main(["compare", str(run), str(run.with_name("1"))]) in (0, 2)
        assert main(["evaluate", str(run)]) == 0
    said = capfd.readouterr()
    assert CANARY not in said.out + said.err
    assert holding(root) == []
    assert wrong_modes(root, mask) == {}
