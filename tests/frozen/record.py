"""Record the frozen facts again after an intended change: `make frozen-record`. The commit gives the reason."""

import tarfile
import tempfile
from pathlib import Path

from lightning_llm.__main__ import main
from tests.frozen.frozen_facts import (
    HERE,
    SWEEPS,
    config_lines,
    file_key_lines,
    plan_lines,
    recipes,
    sweep_lines,
    verb_lines,
    verdict_lines,
)
from tests.small_runs import small_words, write_corpus


def record() -> None:
    """Write every file that test_frozen.py compares with, and print the names of those that changed."""
    _write("configs.txt", config_lines())
    _write("verbs.txt", verb_lines())
    for name in SWEEPS:
        _write(f"sweeps/{name}.txt", sweep_lines(name))
    for override in recipes():
        _write(f"plans/{override.removeprefix('recipe=')}.txt", plan_lines(override))
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        corpus = write_corpus(here / "corpus")
        main(["train", *small_words(corpus, here)])
        _write("keys.txt", file_key_lines(here / "run"))
        for archive in sorted(HERE.glob("*.tar.xz")):
            with tarfile.open(archive) as runs:
                runs.extractall(here / archive.stem, filter="data")
            _write(f"{archive.name.removesuffix('.tar.xz')}.txt", verdict_lines(here / archive.stem, here / "report"))


def _write(name: str, lines: list[str]) -> None:
    file, text = HERE / name, "\n".join(lines) + "\n"
    if not file.exists() or file.read_text() != text:
        print(f"changed: {name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    record()
