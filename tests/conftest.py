"""What many tests share: a small corpus and the words that make a run of seconds."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("shared machine", deadline=None)  # where one example may wait longer than all others
settings.load_profile("shared machine")

WORDS = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he"]

SLOW_FOLDERS = ("launch", "parallel", "sweep", "train")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of few tests that take long: of two workers, one would be left with them at the end."""
    items.sort(key=lambda item: item.path.parent.name not in SLOW_FOLDERS)


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory) -> Path:
    """A folder with `documents.jsonl`: 120 documents of seeded words, and room for token caches."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(0)
    with (folder / "documents.jsonl").open("w") as file:
        for _ in range(120):
            words = [generator.choice(WORDS) for _ in range(generator.randint(60, 200))]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return folder


@pytest.fixture(scope="session")
def small_run(corpus_folder):
    """Return overrides of a run of 6 steps in a second or two: 2 micro-batches per step, validation every 3 steps."""

    def words(folder: Path, *more: str) -> list[str]:
        return [
            "model=llama_tiny",
            "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=1",
            "model.ffn_hidden_size=64", "model.vocab_size=320", "data=jsonl", "precision=fp32",
            f"data.sources.jsonl.path={corpus_folder / 'documents.jsonl'}", f"data.cache_dir={corpus_folder / 'cache'}",
            "data.tokenizer.vocab_size=300", "data.validation.fraction=0.1", "data.validation.sequences=6",
            "data.sequence_length=32", "data.micro_batch_size=2", "data.global_batch_size=4", "schedule.warmup_steps=2",
            "trainer.max_steps=6", "trainer.validate_every_steps=3", "trainer.threads=1", "trainer.accelerator=cpu",
            "checkpoint.every_steps=2",
            "callbacks=none", "logger=none", f"run.root={folder}", f"run.dir={folder / 'run'}",
            *more,
        ]  # fmt: skip

    return words
