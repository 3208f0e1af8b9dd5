"""Records: the column that holds the text, and one-line errors from the libraries that read them."""

import logging
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import unpickling_problem


def text_of(record: Mapping[str, Any], column: str, key: str, where: str) -> str | None:
    """Return the text in `column`, None where it is null; `where` names the place in the source at `key`.

    Raises:
        ConfigError: there is no such column, or it holds something else.
    """
    if column not in record:
        text = (
            f"{where} has no column {column!r}; it has {', '.join(map(repr, record)) or 'none'}. "
            "Name the column of the text, or choose a path without such records."
        )
        raise ConfigError(Problem(f"{key}.text_key", text))
    value = record[column]
    if value is not None and not isinstance(value, str):
        text = f"column {column!r} of {where} holds {type(value).__name__}, not text."
        raise ConfigError(Problem(f"{key}.text_key", text))
    return value


@contextmanager
def raised_in_a_line() -> Iterator[None]:
    """Turn what `datasets` and pyarrow raise in the block, of whatever library, into a ValueError of one line.

    The readers of `datasets` also log tracebacks; those are suppressed.
    """
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    try:
        yield
    except (ConfigError, ValueError, OSError, EOFError, KeyError):  # a source reports these in a line
        raise
    except pickle.UnpicklingError as error:
        raise ValueError(f"a sample {unpickling_problem(error)}") from error
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{first} (nothing that lies beside data is run here)") from error
