"""A small corpus, and the words that make a run of seconds on it."""

import json
import random
from pathlib import Path

WORDS = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he"]


def write_corpus(folder: Path) -> Path:
    """Write `documents.jsonl` into `folder`, 120 documents of seeded words; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    with (folder / "documents.jsonl").open("w") as file:
        for _ in range(120):
            words = [generator.choice(WORDS) for _ in range(generator.randint(60, 200))]
            file.write(json.dumps({"text": " ".join(words)}) + "\n")
    return folder


def small_words(corpus: Path, folder: Path, *more: str) -> list[str]:
    """Return overrides of a run in `folder`/run: 6 steps of 2 micro-batches, validation every 3 steps."""
    return [
        "model=llama_tiny",
        "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=1",
        "model.ffn_hidden_size=64", "model.vocab_size=320", "data=jsonl", "precision=fp32",
        f"data.sources.jsonl.path={corpus / 'documents.jsonl'}", f"data.cache_dir={corpus / 'cache'}",
        "data.tokenizer.vocab_size=300", "data.validation.fraction=0.1", "data.validation.sequences=6",
        "data.sequence_length=32", "data.micro_batch_size=2", "data.global_batch_size=4", "schedule.warmup_steps=2",
        "trainer.max_steps=6", "trainer.validate_every_steps=3", "trainer.threads=1", "trainer.accelerator=cpu",
        "checkpoint.every_steps=2",
        "callbacks=none", "logger=none", f"run.root={folder}", f"run.dir={folder / 'run'}",
        *more,
    ]  # fmt: skip
