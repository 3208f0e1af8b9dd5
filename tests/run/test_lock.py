"""The lock of a run's folder: looked at by several at once, taken by one, no good where it cannot be opened."""

import errno
import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_llm.errors import ConfigError
from lightning_llm.record.sweep_file import LOCKS
from lightning_llm.run import lock
from lightning_llm.run.lock import is_locked, lock_run


@contextmanager
def another_looks(folder: Path) -> Iterator[None]:
    with (folder.parent / LOCKS / f"{folder.name}.run").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def test_lookers_do_not_take_each_other_for_a_trainer(tmp_path):
    folder = tmp_path / "0"
    assert not is_locked(folder)
    held = lock_run(folder)
    assert is_locked(folder)
    held.release()
    with another_looks(folder):
        assert not is_locked(folder)


def test_a_run_starts_although_another_process_looks(tmp_path, monkeypatch):
    folder = tmp_path / "0"
    lock_run(folder).release()
    monkeypatch.setattr(lock, "LOOKED_AT_SECONDS", 60.0)
    with another_looks(folder):
        ended = threading.Event()
        starter = threading.Thread(target=lambda: (lock_run(folder).release(), ended.set()))
        starter.start()
        assert not ended.wait(0.1)  # it does wait
    starter.join()
    assert ended.is_set()


def test_a_lock_that_cannot_be_opened_is_told_by_who_takes_it(tmp_path):
    (tmp_path / LOCKS / "0.run").mkdir(parents=True)
    assert not is_locked(tmp_path / "0")
    with pytest.raises(ConfigError, match="cannot be written \\(Is a directory\\)"):
        lock_run(tmp_path / "0")
    other = tmp_path / "other"
    other.mkdir()
    (other / LOCKS).write_text("no folder")
    assert not is_locked(other / "0")
    with pytest.raises(ConfigError, match="cannot be written \\(File exists\\)"):
        lock_run(other / "0")


@pytest.mark.filterwarnings("ignore:flock not supported")
def test_a_file_system_without_flock_is_looked_at_all_the_same(tmp_path, monkeypatch):
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    held = lock_run(tmp_path / "0")
    assert is_locked(tmp_path / "0")
    held.release()
    assert not is_locked(tmp_path / "0")
