"""`tokenizer.json` of a run's folder, held against the digest that the run's summary has of it. Imports no torch."""

from pathlib import Path

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import digest_problem
from lightning_llm.config.weight_files import TOKENIZER
from lightning_llm.tracking.files import summary_of

DIGEST = "tokenizer_digest"
"""The key of summary.json. Runs of earlier releases have none."""


def tokenizer_problem(folder: Path) -> str | None:
    """Return what is wrong with the file by its bytes, as the rest of a sentence; None where nothing is known of it.

    Raises:
        ValueError: the summary is damaged.
    """
    digest = summary_of(folder).get(DIGEST)
    return digest_problem(folder / TOKENIZER, digest) if isinstance(digest, str) else None


def run_tokenizer(folder: Path) -> Path | None:
    """Return the file, None where there is none and the run's summary says nothing of one.

    Raises:
        ConfigError: it is not the one that the run was trained with.
    """
    try:
        problem = tokenizer_problem(folder)
    except ValueError as error:
        raise ConfigError(Problem(str(folder), f"{error}.")) from error
    if problem:
        text = f"{problem}. Bring the run's own back from a copy; resume=auto on the run writes it anew."
        raise ConfigError(Problem(str(folder / TOKENIZER), text))
    return folder / TOKENIZER if (folder / TOKENIZER).is_file() else None
