"""Addresses of SQLite databases in SQLAlchemy's format, where "?" and "%" have a special meaning."""

from pathlib import Path

SQLITE = "sqlite:///"


def sqlite_address(file: Path) -> str:
    """Return the address of the database `file`, with an absolute path."""
    path = str(file.absolute())
    plain = f"{SQLITE}{path}"
    if "?" not in path and "%" not in path:  # sqlalchemy takes 0.3 seconds to import
        return plain
    from sqlalchemy.engine import URL, make_url

    return plain if make_url(plain).database == path else URL.create("sqlite", database=path).render_as_string()


def sqlite_file(address: str) -> Path | None:
    """Return the file of the database at `address`, None if it does not begin with `sqlite:///`."""
    if not address.startswith(SQLITE):
        return None
    if "?" not in address and "%" not in address:
        return Path(address.removeprefix(SQLITE))
    from sqlalchemy.engine import make_url

    return Path(make_url(address).database or "")


def absolute_address(address: str) -> str:
    """Return `address` with an absolute path if it is an SQLite database; other addresses are unchanged."""
    file = sqlite_file(address)
    if file is None or file.is_absolute():
        return address
    from sqlalchemy.engine import make_url

    return make_url(address).set(database=str(file.absolute())).render_as_string()
