"""Addresses of SQLite databases, as SQLAlchemy writes and reads them: in those, "?" and "%" of a path mean another."""

from pathlib import Path

SQLITE = "sqlite:///"


def sqlite_address(file: Path) -> str:
    """Return the address of the database `file`, which is made absolute."""
    path = str(file.absolute())
    plain = f"{SQLITE}{path}"
    if "?" not in path and "%" not in path:  # sqlalchemy takes 0.3 seconds to import
        return plain
    from sqlalchemy.engine import URL, make_url

    return plain if make_url(plain).database == path else URL.create("sqlite", database=path).render_as_string()


def sqlite_file(address: str) -> Path | None:
    """Return the file of the database at `address`, None where that is no `sqlite:///`."""
    if not address.startswith(SQLITE):
        return None
    if "?" not in address and "%" not in address:
        return Path(address.removeprefix(SQLITE))
    from sqlalchemy.engine import make_url

    return Path(make_url(address).database or "")


def absolute_address(address: str) -> str:
    """Return `address` with the path of an SQLite database absolute; any other address stays."""
    file = sqlite_file(address)
    if file is None or file.is_absolute():
        return address
    from sqlalchemy.engine import make_url

    return make_url(address).set(database=str(file.absolute())).render_as_string()
