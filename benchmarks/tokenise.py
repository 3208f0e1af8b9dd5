"""Tokenising in processes: what a core encodes, what all do over it, and memory for ten times the text."""

import os
import resource
import tempfile
import time
from collections.abc import Iterator
from itertools import chain, repeat
from multiprocessing import get_context
from pathlib import Path

from benchmarks.rotation import Row
from lightning_llm.config.schema.data import LOADERS
from lightning_llm.data.encode import encode_batches
from lightning_llm.data.prepare import HeldOut, Scan, prepare_streams
from lightning_llm.data.source import Document, Source
from lightning_llm.data.tokenizer import Tokenizer, train_bpe

VOCAB_SIZE = 8192
BATCH_BYTES = 1 << 20
TIMED_BYTES = 48 << 20
SMALL_BYTES = 32 << 20


class Repeated(Source):
    """A source that gives the same documents again until they are `text_bytes` in all."""

    def __init__(self, source: Source, text_bytes: int):
        super().__init__(source.name, source.config)
        self.text_bytes = text_bytes

    def documents(self) -> Iterator[Document]:
        """Yield them."""
        left = self.text_bytes
        for each in chain.from_iterable(repeat(list(super().documents()))):
            yield each
            left -= each.text_bytes
            if left <= 0:
                return


def library() -> Source:
    """Return the standard library's sources."""
    return Source("code", LOADERS["python"].model_validate({"loader": "python", "part": "code"}))


def batches(text_bytes: int) -> list[list[Document]]:
    """Return documents of `text_bytes` in all, in lists of about `BATCH_BYTES`."""
    made: list[list[Document]] = [[]]
    size = 0
    for each in Repeated(library(), text_bytes).documents():
        made[-1].append(each)
        size += each.text_bytes
        if size >= BATCH_BYTES:
            made.append([])
            size = 0
    return [batch for batch in made if batch]


def rate(tokenizer: Tokenizer, given: list[list[Document]], processes: int) -> float:
    """Return the bytes per second that `processes` encode, from when the first batch is back on."""
    encoded = encode_batches(tokenizer, given, processes)
    for _ in range(2 * processes):  # they have started
        next(encoded)
    start = time.perf_counter()
    return sum(each.text_bytes for batch, _ in encoded for each in batch) / (time.perf_counter() - start)


def peak_bytes(tokenizer: Tokenizer, folder: Path, text_bytes: int) -> int:
    """Return the largest resident set of a process that makes a cache of `text_bytes`. Runs in one of its own."""
    found = Scan(1, text_bytes, 0, 0)
    prepare_streams(Repeated(library(), text_bytes), found, HeldOut(0, frozenset()), tokenizer, folder, False, 2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure() -> Iterator[Row]:
    """Yield the rate of one process, of all cores over it, and the peak memory of ten times the text over once."""
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_bpe((each.text for each in library().documents()), VOCAB_SIZE, folder / "tokenizer.json")
        tokenizer, given = Tokenizer(folder), batches(TIMED_BYTES)
        one = one_thread_rate(tokenizer, given)
        yield "tokenising in one process, MB/s", one / 1e6, ""
        every = max(rate(tokenizer, given, cores) for _ in range(3))
        yield f"tokenising in {cores} processes over one, per core", every / one / cores, ">= 0.9"
        peaks = []
        for number, text_bytes in enumerate((SMALL_BYTES, 10 * SMALL_BYTES)):
            with get_context("spawn").Pool(1) as pool:
                peaks.append(pool.apply(peak_bytes, (tokenizer, folder / str(number), text_bytes)))
        yield "peak memory of 320 MB of text over 32 MB", peaks[1] / peaks[0], "<= 1.1"


def one_thread_rate(tokenizer: Tokenizer, given: list[list[Document]]) -> float:
    """Return the best of three rates of this process with one thread."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        return max(rate(tokenizer, given, 1) for _ in range(3))
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
