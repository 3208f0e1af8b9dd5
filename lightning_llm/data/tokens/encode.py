"""Encoding documents in several processes, in order: the result does not depend on their number.

Threads would parallelize the search for merges, but not Python's work on each token. A process runs this module
(`python -m ...data.tokens.encode`) and communicates through pipes: unlike `multiprocessing` it neither forks a process
with threads nor runs the user's script again. It ends when its input ends, and so with the process that started it.

Protocol, as pickles. Input: a `Tokenizer`, then lists of texts. Output for each list: (concatenated tokens, number of
tokens of each text, number of characters of each text without a token), or a ConfigError.
"""

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.process import python_environment, python_module
from lightning_llm.data.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:  # a process starts sooner without the config's schema
    from lightning_llm.data.sources.source import Document

SMALLEST_TEXT_BYTES = 32 << 20
"""Smallest source for which processes are started by default: shorter ones take less time than starting them."""
AHEAD = 2  # batches per process that wait or are at work: the reader is never more than so far ahead of the writer

Counted = tuple[list[np.ndarray], list[int]]
"""Token ids of each text, and the number of its characters without a token."""
Encoded = tuple[list["Document"], list[np.ndarray], list[int]]


def process_count(asked: int | None, text_bytes: int, tokenizer: Tokenizer) -> int:
    """Return the number of processes that encode a source of `text_bytes`: `asked` if given, else one per core.

    1 means this process. It is used for plain bytes, which are only copied, and by default for short sources.
    """
    if tokenizer.is_bytes:
        return 1
    if asked is not None:
        return asked
    if text_bytes < SMALLEST_TEXT_BYTES:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def encode_batches(
    tokenizer: Tokenizer, batches: Iterable[list["Document"]], processes: int
) -> Generator[Encoded, None, None]:
    """Yield (documents, token ids of each [tokens], characters of each without a token) for each of `batches`.

    `processes`: number of processes that encode; 1 means this process, with the tokenizer's own threads. At most
    `AHEAD` batches per process are in memory.

    Raises:
        ConfigError: a process was killed, or the tokenizer rejects a text.
    """
    if processes == 1:
        for batch in batches:
            yield batch, *_counted(tokenizer, [each.text for each in batch])
        return
    workers: list[_Worker] = []
    free: SimpleQueue[_Worker] = SimpleQueue()

    def encode(batch: list["Document"]) -> Counted:
        worker = free.get()
        try:
            return worker.encode([each.text for each in batch])
        finally:
            free.put(worker)

    pool = ThreadPoolExecutor(processes)
    waiting: deque[tuple[list[Document], Future[Counted]]] = deque()
    try:
        for _ in range(processes):
            workers.append(_Worker(tokenizer))
            free.put(workers[-1])
        for batch in batches:
            waiting.append((batch, pool.submit(encode, batch)))
            if len(waiting) >= AHEAD * processes:
                yield _result(waiting.popleft())
        while waiting:
            yield _result(waiting.popleft())
    finally:
        for each in workers:
            each.process.kill()
        pool.shutdown(cancel_futures=True)
        for each in workers:
            each.close()


def _result(waiting: "tuple[list[Document], Future[Counted]]") -> Encoded:
    batch, encoded = waiting
    return batch, *encoded.result()


def _counted(tokenizer: Tokenizer, texts: Sequence[str]) -> Counted:
    """Return `Tokenizer.encode_counted`. Raises ConfigError for a text that the tokenizer refuses."""
    try:
        return tokenizer.encode_counted(texts)
    except Exception as error:
        if type(error) is not Exception:  # the only class that the library raises; any other is a fault of ours
            raise
        text = f"{tokenizer.path} has no tokens for some document: {error}. Give it a token for unknown text."
        raise ConfigError(Problem("data.tokenizer.path", text)) from error


class _Worker:
    """One process, and the pipes to it."""

    def __init__(self, tokenizer: Tokenizer):
        command = python_module("lightning_llm.data.tokens.encode")
        environment = os.environ | python_environment()
        environment |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}  # a core for each
        pipe = subprocess.PIPE
        # A separate process group: Ctrl-C goes to the parent process, which then closes the pipe.
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, process_group=0)
        self._send(tokenizer)

    def encode(self, texts: Sequence[str]) -> Counted:
        """Return each text's token ids, and the number of its characters without one."""
        self._send(texts)
        try:
            answer = pickle.load(self._pipe(self.process.stdout))
        except EOFError as error:
            raise self._ended() from error
        if isinstance(answer, ConfigError):
            raise answer
        tokens, counts, dropped = answer
        return np.split(tokens, np.cumsum(counts)[:-1]), dropped

    def close(self) -> None:
        """Wait for the end of the process and close its pipes."""
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                self._pipe(pipe).close()
            except BrokenPipeError:
                continue  # the rest has no reader

    def _send(self, what: Any) -> None:
        pipe = self._pipe(self.process.stdin)
        try:
            pickle.dump(what, pipe, pickle.HIGHEST_PROTOCOL)
            pipe.flush()
        except BrokenPipeError as error:
            raise self._ended() from error

    def _ended(self) -> ConfigError:
        text = (
            f"a process that tokenizes ended with exit code {self.process.wait()} (-9: killed, often because memory "
            "was exhausted). Set fewer."
        )
        return ConfigError(Problem("data.tokenize_processes", text))

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        if pipe is None:
            raise RuntimeError("the process was started without pipes")
        return pipe


def serve() -> None:
    """Run an encoding process: encode lists of texts from stdin until it ends, and write the results to stdout.

    Anything that a library prints goes to stderr.
    """
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    tokenizer: Tokenizer = pickle.load(sys.stdin.buffer)
    while True:
        try:
            texts = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: Any
        try:
            encoded, dropped = _counted(tokenizer, texts)
            tokens = np.concatenate(encoded).astype(tokenizer.token_dtype)
            answer = tokens, [len(each) for each in encoded], dropped
        except ConfigError as error:
            answer = error
        try:
            pickle.dump(answer, out, pickle.HIGHEST_PROTOCOL)
            out.flush()
        except BrokenPipeError:  # the process that asked is gone
            os._exit(0)


if __name__ == "__main__":
    serve()
