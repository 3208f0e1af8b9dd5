"""The CPU seconds that each test file used, children included, printed at the end: a budget that a busy machine keeps.

Wall-clock seconds depend on the load of the machine; CPU seconds are the cost of a file on two idle cores.
"""

from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

SHOWN = 40


def used_cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all that it started, running or ended."""
    this = psutil.Process()
    seconds = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            seconds += sum(process.cpu_times()[:4])  # user, system, and both of children that were waited for
        except psutil.NoSuchProcess:
            continue  # it has ended since; its parent has its seconds
    return seconds


class CpuSeconds:
    """A pytest plugin, in the process that runs tests and in the one that hands them out to xdist's workers."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._seconds: Counter[str] = Counter()
        self._before = 0.0

    def pytest_collection_finish(self) -> None:
        self._charge("imports and collection")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        done = yield
        if nextitem is None or nextitem.path != item.path:
            self._charge(str(item.path.relative_to(Path(__file__).parent)))
        return done

    def _charge(self, what: str) -> None:
        now = used_cpu_seconds()
        self._seconds[what] += now - self._before
        self._before = now

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["cpu_seconds"] = dict(self._seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._seconds.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))  # none where it crashed

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"CPU seconds: {self._seconds.total():.0f}, most in")
        for what, seconds in self._seconds.most_common(SHOWN):
            terminalreporter.line(f"{seconds:7.1f}  {what}")
