"""A long TMPDIR: the sockets of loader processes, of the fork server and of Ray lie elsewhere."""

import os
import tempfile
from multiprocessing import connection, process
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_llm.base import folders
from lightning_llm.base.errors import ConfigError


@pytest.fixture
def long_folder(tmp_path, monkeypatch):
    folder = tmp_path / ("scratch-of-a-project-with-a-long-name/" * 4)
    folder.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setitem(process.current_process()._config, "tempdir", None)
    return folder


def test_loader_processes_hand_over_tensors(long_folder):
    with pytest.raises(OSError, match="AF_UNIX"):
        connection.Listener(str(long_folder / "listener-12345678"))
    folders.use_short_sockets()
    assert tempfile.gettempdir() == str(long_folder)  # files are where they were asked for
    loaded = list(DataLoader([torch.arange(3), torch.arange(4)], batch_size=None, num_workers=1))
    assert [each.tolist() for each in loaded] == [[0, 1, 2], [0, 1, 2, 3]]
    assert len(connection.arbitrary_address("AF_UNIX")) < folders.LONGEST_PATH
    assert list(long_folder.iterdir()) == []


def test_rays_sockets_and_a_short_folder(long_folder, monkeypatch):
    assert Path(folders.ray_environment()["RAY_TMPDIR"]).is_dir()
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert folders.ray_environment() == {}
    folders.use_short_sockets()
    assert process.current_process()._config["tempdir"] is None  # left to multiprocessing


def test_without_a_short_folder_the_variable_is_named(long_folder, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"TMPDIR: is .*Set TMPDIR to a folder with at most \d+ bytes"):
        folders.use_short_sockets()
