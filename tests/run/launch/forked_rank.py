"""A rank that is forked from a process that has imported all."""

from tests.sweep.forked_jobs import ForkedJob


class ForkedRank(ForkedJob):
    """The part of `subprocess.Popen` that torch's agent uses."""

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self.process.join(timeout)
        return self.process.exitcode
