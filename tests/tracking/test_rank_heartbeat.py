"""Ranks without a sign of life are distinguished from waiting ones. 1 second."""

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from lightning_llm.tracking.provenance import process_mark
from lightning_llm.tracking.rank_liveness import (
    RankHeartbeat,
    absent_ranks,
    absent_text,
    beats,
    clear_beats,
    is_silent_text,
    silent_ranks,
    silent_text,
)

TIMEOUT = 60.0


@pytest.fixture
def sleeper():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def mark_of(process: subprocess.Popen) -> str:
    host, _, _ = process_mark().split()
    return f"{host} {process.pid} {psutil.Process(process.pid).create_time():.0f}"


def stop(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def collective(number: int, age: float, ended: bool) -> dict:
    return {
        "profiling_name": "gloo:all_reduce",
        "collective_seq_id": number,
        "group": "default_pg",
        "ended": ended,
        "age_seconds": age,
    }


def write(run_dir: Path, rank: int, mark: str, age: float, step: int = 3, kept: tuple[dict, ...] = ()) -> None:
    heartbeat = RankHeartbeat(run_dir, rank, TIMEOUT, lambda: step, lambda: kept)
    heartbeat._about["process"] = mark
    heartbeat._write()
    now = time.time()
    os.utime(heartbeat.file, (now - age, now - age))


def test_the_rank_that_is_stopped_is_named_and_ended(tmp_path, sleeper):
    for rank, age in ((0, 0.0), (2, 7.0)):
        write(tmp_path, rank, process_mark(), age)
    write(tmp_path, 1, mark_of(sleeper), 58.0)
    stop(sleeper)
    (silent,) = silent_ranks(tmp_path, TIMEOUT)
    said = silent_text([silent], TIMEOUT)
    assert said.startswith(
        f"rank 1 (process {sleeper.pid} of this machine, which is stopped) has given no sign of life"
    )
    assert "for 58 s; its last heartbeat is from step 4, at test_rank_heartbeat.py:" in said
    assert said.endswith("The other ranks waited (parallel.timeout_seconds=60)")
    silent.end_if_stopped()
    assert sleeper.wait(timeout=30) == -signal.SIGKILL


def test_a_silent_process_that_is_not_stopped_or_is_another_now_is_left_alone(tmp_path, sleeper):
    host, number, started = mark_of(sleeper).split()
    write(tmp_path, 0, process_mark(), 0.0)
    write(tmp_path, 1, f"{host} {number} {started}", 50.0)
    write(tmp_path, 2, f"{host} {number} {int(started) - 1000}", 55.0)
    write(tmp_path, 3, f"elsewhere {number} {started}", 59.0)
    stop(sleeper)
    found = {each.rank: each.is_stopped for each in silent_ranks(tmp_path, TIMEOUT)}
    assert found == {1: True, 2: False, 3: False}
    sleeper.send_signal(signal.SIGCONT)
    os.waitpid(sleeper.pid, os.WCONTINUED)
    for each in silent_ranks(tmp_path, TIMEOUT):
        each.end_if_stopped()
    assert sleeper.poll() is None
    assert "rank 3 (process " in silent_text(silent_ranks(tmp_path, TIMEOUT), TIMEOUT)
    assert "of the machine elsewhere) has given no sign of life for 59 s" in silent_text(beats(tmp_path), TIMEOUT)


def test_ranks_that_live_are_not_named_whatever_their_clock(tmp_path):
    steps = iter(range(1000))
    heartbeat = RankHeartbeat(tmp_path, 0, 0.05, lambda: next(steps))
    heartbeat.start()
    deadline = time.monotonic() + 30
    while beats(tmp_path)[0].step < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert beats(tmp_path)[0].step >= 3
    heartbeat.stop()
    long_ago = time.time() - 1e6  # the clock of the file server is days behind
    write(tmp_path, 1, process_mark(), 1e6)
    heartbeat._write()
    os.utime(heartbeat.file, (long_ago, long_ago))
    assert silent_ranks(tmp_path, TIMEOUT) == []
    clear_beats(tmp_path)
    assert beats(tmp_path) == []


def test_a_live_rank_that_joins_no_collective_is_reported_with_its_last_one(tmp_path):
    waits = collective(13, 61.0, ended=False)
    write(tmp_path, 0, process_mark(), 0.0, kept=(collective(12, 61.1, ended=True), waits))
    write(tmp_path, 1, process_mark(), 5.0, kept=(collective(11, 57.0, ended=True), collective(12, 56.0, ended=True)))
    write(tmp_path, 2, process_mark(), 5.0, kept=(collective(12, 20.0, ended=True),))  # it may just be slow
    write(tmp_path, 3, process_mark(), 0.0)  # nobody keeps its collectives
    assert silent_ranks(tmp_path, TIMEOUT) == []
    (absent,) = absent_ranks(tmp_path, TIMEOUT)
    said = absent_text([absent], TIMEOUT, waits)
    assert said.startswith(
        f"rank 1 (process {os.getpid()} of this machine) has not joined the collective of the other ranks: "
    )
    assert "started no collective for 61 s and is in step 4, at test_rank_heartbeat.py:" in said
    assert ", last in gloo:all_reduce 12 of group default_pg. The other ranks waited in gloo:all_reduce 13 of" in said
    assert is_silent_text(said)
    assert any(line.startswith("test_rank_heartbeat.py:") for line in absent.stack)


def test_a_rank_waiting_for_a_pipeline_message_does_not_count_as_absent(tmp_path, monkeypatch):
    idle = (collective(12, 61.0, ended=True),)
    lock, here = threading.Lock(), threading.Event()
    work = SimpleNamespace(wait=lock.acquire)  # which is no Python, as that of torch's works

    def stage() -> None:
        here.set()
        work.wait()

    lock.acquire()
    waiting = threading.Thread(target=stage)
    waiting.start()
    here.wait()
    deadline = time.monotonic() + 30
    with monkeypatch.context() as patch:
        patch.setattr(threading, "main_thread", lambda: waiting)
        write(tmp_path, 1, process_mark(), 0.0, kept=idle)
        while absent_ranks(tmp_path, TIMEOUT) and time.monotonic() < deadline:  # it may not be at that line yet
            write(tmp_path, 1, process_mark(), 0.0, kept=idle)
    assert absent_ranks(tmp_path, TIMEOUT) == []
    lock.release()
    waiting.join()
    write(tmp_path, 1, process_mark(), 0.0, kept=idle)
    assert [each.rank for each in absent_ranks(tmp_path, TIMEOUT)] == [1]


def test_collectives_of_a_rank_are_dumped_before_others_time_out(tmp_path):
    write(tmp_path, 0, process_mark(), 0.0, kept=(collective(1, 40.0, True), collective(2, 29.0, True)))
    assert not (tmp_path / "ranks" / "gloo_0").exists()
    write(tmp_path, 0, process_mark(), 0.0, kept=(collective(1, 40.0, True), collective(2, 31.0, False)))
    dump = json.loads((tmp_path / "ranks" / "gloo_0").read_text())
    assert [each["collective_seq_id"] for each in dump["collectives"]] == [1, 2]
    assert dump["collective"]["collective_seq_id"] == 2
    assert any("test_collectives_of_a_rank" in line for line in dump["threads"]["MainThread"])
    assert [each.rank for each in beats(tmp_path)] == [0]
