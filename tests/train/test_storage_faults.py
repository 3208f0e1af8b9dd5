"""A disk that fills up or refuses in the middle of a run, and kill -9 at any operation on a file.

20 seconds; 5 minutes with `full`, which kills at every one.
"""

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_llm.__main__ import main
from lightning_llm.train.checkpoint.saver import Saver
from lightning_llm.train.checkpoint.verification import newest_verified, verified
from tests.parallel.rank_group import RankGroup
from tests.run_metrics import curve, same_weights, steps_saved

LIMIT_BYTES = 100_000
"""Less than a file of shards of `small_run`, more than any other of its files."""
WATCHED = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}


@pytest.fixture(scope="module")
def child() -> Iterator[RankGroup]:
    """A process that a test may limit, or kill; the next call begins a new one."""
    group = RankGroup(1)
    yield group
    group.close()


def told_by(words: list[str], folder: Path) -> tuple[int, str]:
    """Run in this process with stderr redirected to a file; return (exit code, its content)."""
    log = folder / "stderr"
    with log.open("w") as file:
        sys.stderr, before = file, sys.stderr
        try:
            code = main(["train", *words])
        finally:
            sys.stderr = before
    return code, log.read_text()


def with_full_disk(words: list[str], folder: Path) -> tuple[int, str]:
    """Run where no file can grow beyond a limit (RLIMIT_FSIZE): from the kernel, as of a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return told_by(words, folder)


def with_read_only_folder(words: list[str], folder: Path) -> tuple[int, str]:
    """Run where nothing new can be made in the run's folder after step 5, as with mode 0555 for who is not root."""
    run = folder / "run"

    def refuse(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.mkdir", "os.rename") or not str(arguments[0]).startswith(str(run)):
            return
        new = event != "open" or (arguments[2] & os.O_CREAT and not os.path.exists(arguments[0]))
        if new and '"step": 5' in (run / "metrics.jsonl").read_text():
            raise PermissionError(13, "Permission denied", str(arguments[0]))

    sys.addaudithook(refuse)
    return told_by(words, folder)


COMMON = ("schedule=constant", "data.validation.fraction=0")
ASYNCHRONOUS = ["checkpoint.asynchronous=true", "trainer.max_steps=8"]
"""Step 6 is not the last, which training waits for."""


@pytest.fixture
def begun(tmp_path, small_run) -> Path:
    """The folder above that of a run which has saved step=2 and step=4."""
    assert main(["train", *small_run(tmp_path, *COMMON, "trainer.max_steps=4")]) == 0
    return tmp_path


@pytest.mark.parametrize(
    ("fault", "more"),
    [
        (with_full_disk, []),
        (with_read_only_folder, []),
        (with_full_disk, ASYNCHRONOUS),
        pytest.param(with_read_only_folder, ASYNCHRONOUS, marks=pytest.mark.full),
    ],
)
def test_one_message_and_the_summary_says_it(fault, more, begun, child, small_run):
    words = small_run(begun, *COMMON, "resume=auto", *more)
    good = verified(begun / "run" / "checkpoints" / "step=4")
    code, told = child.call(fault, words, begun)
    child.close()
    assert code == 1
    assert len(told.splitlines()) == 1, told
    assert told.startswith("error: the state of step 6 was not saved: ")
    assert ("File too large" if fault is with_full_disk else "Permission denied") in told
    assert "once the folder can be written again, to resume: " in told
    assert "resume=auto" in told
    summary = json.loads((begun / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "the state of step 6 was not saved" in summary["detail"]
    assert newest_verified(begun / "run" / "checkpoints") == (good, ())
    assert main(["train", *words]) == 0
    assert steps_saved(begun / "run") == ([6, 8] if more else [4, 6])
    assert not list((begun / "run" / "checkpoints").glob(".*"))


def test_a_save_does_not_make_a_folder_again_that_was_moved(tmp_path, small_run, monkeypatch, capsys):
    def save_after_move(saver: Saver, *arguments: Any, **options: Any) -> None:
        if saver.saved_step == 4:
            (tmp_path / "run").rename(tmp_path / "moved")
        save(saver, *arguments, **options)

    save = Saver.save
    monkeypatch.setattr(Saver, "save", save_after_move)
    assert main(["train", *small_run(tmp_path, *COMMON)]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("error: the state of step 6 was not saved: ")
    assert f"run was moved to {tmp_path}/moved during the run" in told
    assert f"--config {tmp_path}/moved/config.yaml resume=auto" in told
    assert not (tmp_path / "run").exists()
    assert json.loads((tmp_path / "moved" / "summary.json").read_text())["status"] == "failed"
    monkeypatch.undo()
    assert main(["train", "--config", str(tmp_path / "moved" / "config.yaml"), "resume=auto"]) == 0
    assert steps_saved(tmp_path / "moved") == [4, 6]


def killed_at(words: list[str], run: str, count: int) -> int:
    """Run, and die by SIGKILL before the `count`-th operation on a file of the run's; return how many there were."""
    seen = [0]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in WATCHED or not str(arguments[0]).startswith(run):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            return
        seen[0] += 1
        if seen[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    assert main(["train", *words]) == 0
    return seen[0]


@pytest.mark.parametrize(
    ("every", "asynchronous"),
    [
        (16, "false"),
        (21, "true"),
        pytest.param(1, "false", marks=pytest.mark.full),
        pytest.param(1, "true", marks=pytest.mark.full),
    ],
)
def test_a_run_killed_at_any_operation_resumes_with_the_same_bits(every, asynchronous, begun, child, small_run):
    """From a start-up that moves a damaged checkpoint aside, through a save that prunes, to the end.

    The asynchronous save of step 4 is written during training; the run waits for the last one.
    """

    def words_in(place: Path) -> list[str]:
        shutil.copytree(begun / "run", place / "run")
        return small_run(place, *COMMON, "resume=auto", f"checkpoint.asynchronous={asynchronous}")

    damaged = begun / "run" / "checkpoints" / "step=4" / "progress.json"
    damaged.write_text(damaged.read_text().replace("4", "5"))
    reference = begun / "reference"
    operations = child.call(killed_at, words_in(reference), str(reference / "run"), 0)
    child.close()
    assert operations > 30
    for count in range(1, operations + 1, every):
        place = begun / f"killed at {count}"
        words = words_in(place)
        with pytest.raises(RuntimeError, match="died"):
            child.call(killed_at, words, str(place / "run"), count)
        checkpoints = place / "run" / "checkpoints"
        chosen, passed_over = newest_verified(checkpoints)
        assert chosen is not None, count
        assert {each.folder.name for each in passed_over} <= {"step=4"}, count
        assert main(["train", *words]) == 0, count
        assert curve(place / "run") == curve(reference / "run"), count
        assert same_weights(place / "run", reference / "run", 6), count
        assert {"step=6", "damaged"} <= {path.name for path in checkpoints.iterdir()}, count
