"""Ranks that torch's agent starts in the test's own process."""

import signal
from collections.abc import Iterator

import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from tests.run.launch.forked_rank import ForkedRank


@pytest.fixture
def forked_ranks(monkeypatch) -> Iterator[None]:
    """Ranks that torch's agent starts in this process are forked from one that has imported all."""

    def popen(handler: SubprocessHandler, command: tuple[str, ...], environment: dict[str, str]) -> ForkedRank:
        return ForkedRank(list(command), 0, environment, None, None)

    monkeypatch.setattr(SubprocessHandler, "_popen", popen)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():  # the agent leaves its own
        signal.signal(number, handler)
