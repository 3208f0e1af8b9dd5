"""Addresses of SQLite databases name the file that they are made of, by SQLAlchemy's own reading."""

import os
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from lightning_llm.tracking.mlflow.store import absolute_address, sqlite_address, sqlite_file


@pytest.mark.parametrize(
    "name", ["plain.db", "what?x=1.db", "50%20.db", "50% of [it] {a} #1.db", "é 漢::'\".db", "%3F?%.db"]
)
def test_an_sqlite_address_opens_exactly_that_file(tmp_path: Path, name: str) -> None:
    address = sqlite_address(tmp_path / name)
    engine = create_engine(address)
    with engine.connect() as connection:
        connection.execute(text("create table t (a int)"))
    engine.dispose()
    assert os.listdir(tmp_path) == [name]
    assert sqlite_file(address) == tmp_path / name


def test_addresses_of_users_keep_their_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert sqlite_file("sqlite:////a/b.db?timeout=5") == Path("/a/b.db")
    assert absolute_address("sqlite:///b.db?timeout=5") == f"sqlite:///{tmp_path}/b.db?timeout=5"
    assert absolute_address("sqlite:////a/b.db") == "sqlite:////a/b.db"
    assert sqlite_file("http://a/b?c") is None
    assert absolute_address("http://a/b?c") == "http://a/b?c"
