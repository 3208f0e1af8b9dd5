"""Tokenizing in processes: speed of one core, speedup of all, equality of the cache's bits, and memory for more
text."""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import psutil

from benchmarks.rotation import Row
from lightning_llm.base.integrity import digest_of_file
from lightning_llm.config.schema.data import LOADERS
from lightning_llm.data.prepare import HeldOut, Scan, prepare_streams
from lightning_llm.data.sources.source import Document, Source
from lightning_llm.data.tokens.encode import encode_batches
from lightning_llm.data.tokens.tokenizer import Tokenizer, train_bpe

VOCAB_SIZE = 8192
BATCH_BYTES = 1 << 20
TIMED_BYTES = 16 << 20
TURNS = 3
COMPARED_BYTES = 8 << 20
SMALL_BYTES = 48 << 20
TIMES = 4
"""Factors of text size in the measurement of memory."""
SAMPLE_SECONDS = 0.05


class Repeated(Source):
    """A source that repeats the same documents up to `text_bytes`."""

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


@dataclass(frozen=True)
class Pace:
    """Speed of encoding: bytes per second, and CPU seconds per byte of this process and of each that it started."""

    bytes_per_second: float
    own_cpu_seconds: float
    others_cpu_seconds: list[float]

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds per byte of all processes."""
        return self.own_cpu_seconds + sum(self.others_cpu_seconds)


def pace(tokenizer: Tokenizer, given: list[list[Document]], processes: int) -> Pace:
    """Return the speed of `processes`, measured from the first results on."""
    encoded = encode_batches(tokenizer, given, processes)
    for _ in range(2 * processes):  # until all have started
        next(encoded)
    here = psutil.Process()
    watched = [here, *here.children()]
    before, start, size = _cpu_seconds(watched), time.perf_counter(), 0
    for _ in range(len(given) - 2 * processes):
        batch, *_ = next(encoded)
        size += sum(each.text_bytes for each in batch)
    seconds = time.perf_counter() - start
    own, *others = ((after - then) / size for after, then in zip(_cpu_seconds(watched), before, strict=True))
    encoded.close()
    return Pace(size / seconds, own, others)


def _cpu_seconds(processes: list[psutil.Process]) -> list[float]:
    return [sum(each.cpu_times()[:2]) for each in processes]  # user and system


def same_bits(tokenizer: Tokenizer, folder: Path, processes: int) -> bool:
    """Return whether the files of a cache made by `processes` are bytewise equal to those made by one."""
    made = []
    for count in (1, processes):
        cache = folder / f"by-{count}"
        streams(tokenizer, cache, COMPARED_BYTES, count)
        made.append({file.relative_to(cache): digest_of_file(file) for file in sorted(cache.glob("tokens-*/*"))})
    return made[0] == made[1] and len(made[0]) > 1


def streams(tokenizer: Tokenizer, folder: Path, text_bytes: int, processes: int) -> None:
    """Make a cache of `text_bytes`."""
    found, held_out = Scan(1, text_bytes, 0, 0), HeldOut(0, frozenset())
    prepare_streams(Repeated(library(), text_bytes), found, held_out, tokenizer, folder, False, processes)


def peak_bytes(tokenizer: Tokenizer, folder: Path, text_bytes: int, processes: int) -> int:
    """Return the peak total resident memory of all processes that make a cache, measured in a separate process."""
    ended, peak, here = threading.Event(), 0, psutil.Process()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(SAMPLE_SECONDS):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                peak = max(peak, sum(each.memory_info().rss for each in [here, *here.children()]))

    thread = threading.Thread(target=watch)
    thread.start()
    streams(tokenizer, folder, text_bytes, processes)
    ended.set()
    thread.join()
    return peak


def measure() -> Iterator[Row]:
    """Yield the speeds of one process and of all cores in turn, equality of bits, and peak memory for more text."""
    cores = len(os.sched_getaffinity(0))
    yield "load of the machine before", os.getloadavg()[0], ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_bpe((each.text for each in library().documents()), VOCAB_SIZE, folder / "tokenizer.json")
        tokenizer, given = Tokenizer(folder), batches(TIMED_BYTES)
        turns = [(one_thread_pace(tokenizer, given), pace(tokenizer, given, cores)) for _ in range(TURNS)]
        yield "tokenising in one process, MB/s", median(one.bytes_per_second for one, _ in turns) / 1e6, ""
        ratios = [every.bytes_per_second / one.bytes_per_second / cores for one, every in turns]
        yield f"tokenising in {cores} processes over one, per core, median of {TURNS}", median(ratios), ">= 0.9"
        yield "  lowest of them", min(ratios), ""
        yield "  highest of them", max(ratios), ""
        # Independent of other load: the process with the most work determines the time.
        bounds = [one.cpu_seconds / max(every.others_cpu_seconds) / cores for one, every in turns]
        yield "  by CPU seconds, one's over the busiest of several", median(bounds), ">= 0.9"
        yield "  CPU seconds of all processes over one's", median(e.cpu_seconds / o.cpu_seconds for o, e in turns), ""
        bits = same_bits(tokenizer, folder, cores)
        yield f"the cache of {COMPARED_BYTES >> 20} MiB is the same, bit by bit, 1: yes", float(bits), "1"
        peaks = []
        for times in (1, TIMES):
            with get_context("spawn").Pool(1) as pool:
                where = tokenizer, folder / str(times), times * SMALL_BYTES, cores
                peaks.append(pool.apply(peak_bytes, where))
        yield f"peak memory of all processes, {SMALL_BYTES >> 20} MiB of text, MB", peaks[0] / 1e6, ""
        yield f"  {TIMES} times the text over it", peaks[1] / peaks[0], "<= 1.1"


def one_thread_pace(tokenizer: Tokenizer, given: list[list[Document]]) -> Pace:
    """Return the speed of this process with one thread."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        return pace(tokenizer, given, 1)
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
