"""The lock of a run's folder: looked at by several at once, taken by one, no good where it cannot be opened."""

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_llm.base.errors import ConfigError
from lightning_llm.run.launch import lock
from lightning_llm.run.launch.lock import is_locked, lock_run
from lightning_llm.tracking.sweep_file import LOCKS


@contextmanager
def another_looks(folder: Path) -> Iterator[None]:
    with (folder.parent / LOCKS / f"{folder.name}.run").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def test_processes_that_check_the_lock_do_not_disturb_each_other(tmp_path):
    folder = tmp_path / "0"
    assert not is_locked(folder)
    held = lock_run(folder)
    assert is_locked(folder)
    held.release()
    with another_looks(folder):
        assert not is_locked(folder)


def test_two_names_of_one_folder_are_one_lock(tmp_path):
    folder = tmp_path / "real" / "0"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    held = lock_run(tmp_path / "link")
    assert is_locked(folder)
    with pytest.raises(ConfigError, match="another process is training in"):
        lock_run(folder)
    held.release()
    assert not is_locked(tmp_path / "link")
    lock_run(folder).release()


def test_a_folder_that_is_mounted_under_another_parent_is_locked_by_its_inode(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LOOKED_AT_SECONDS", 0.1)
    folder = tmp_path / "0"
    made_later = lock_run(folder)  # the folder of a new run is made under the lock
    folder.mkdir()
    inode = os.open(folder, os.O_RDONLY)  # as a process that uses another path of the folder
    fcntl.flock(inode, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert "another process is training in" in str(lock.lock_made_folder(folder))
    made_later.release()
    assert is_locked(folder)
    with pytest.raises(ConfigError, match="another process is training in"):
        lock_run(folder)
    os.close(inode)
    held = lock_run(folder)
    assert lock.lock_made_folder(folder) is None
    held.release()


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


def test_a_lock_that_cannot_be_opened_is_reported_when_it_is_acquired(tmp_path):
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
def test_locks_work_on_file_systems_without_flock(tmp_path, monkeypatch):
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    held = lock_run(tmp_path / "0")
    assert is_locked(tmp_path / "0")
    held.release()
    assert not is_locked(tmp_path / "0")
