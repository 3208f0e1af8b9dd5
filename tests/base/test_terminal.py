"""Standard streams that cannot be written: closed, full, without a reader; and characters outside their encoding."""

import errno
import io
import os
import sys

import pytest

from lightning_llm.__main__ import main
from lightning_llm.base.terminal import lasting_output


class Failing(io.StringIO):
    """A stream without a descriptor that raises `error` when written."""

    def __init__(self, error: Exception):
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error


ERRORS = {
    "pipe": BrokenPipeError(errno.EPIPE, "Broken pipe"),
    "hangup": OSError(errno.EIO, "Input/output error"),
    "full": OSError(errno.ENOSPC, "No space left on device"),
    "descriptor": OSError(errno.EBADF, "Bad file descriptor"),
    "closed": ValueError("I/O operation on closed file."),
}


@pytest.mark.parametrize("how", ERRORS)
def test_a_stream_that_fails_is_dropped_and_the_other_says_so_once(how, monkeypatch):
    for name, other in (("stdout", "stderr"), ("stderr", "stdout")):
        kept = io.StringIO()
        monkeypatch.setattr(sys, name, Failing(ERRORS[how]))
        monkeypatch.setattr(sys, other, kept)
        with lasting_output():
            for _ in range(3):
                print("a line", file=getattr(sys, name), flush=True)
                print("another", file=getattr(sys, other), flush=True)
        monkeypatch.undo()
        assert kept.getvalue().count("can no longer be written") == 1
        assert kept.getvalue().count("another") == 3


@pytest.mark.parametrize(("how", "code"), [("pipe", 141), ("full", 1), ("hangup", 1), ("closed", 1), (None, 1)])
def test_a_verb_that_only_prints_fails_if_stdout_cannot_be_written(how, code, monkeypatch):
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(sys, "stdout", None if how is None else Failing(ERRORS[how]))
    assert main(["recipes"]) == code
    monkeypatch.undo()
    told = errors.getvalue()
    assert told == "" if code == 141 else told.startswith("error: stdout cannot be written: ")
    assert told.count("\n") == (code == 1)


def test_a_closed_stderr_changes_no_exit_code(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["recipes"]) == 0
    assert main(["recipes", "--config-dir", "/no/such"]) == 2
    with lasting_output():
        kept = sys.stderr
    print("a handler of logging writes as the process ends", file=kept, flush=True)
    monkeypatch.undo()
    told = capsys.readouterr().out
    assert "quickstart" in told
    assert "can no longer be written" not in told


def test_characters_that_the_encoding_lacks_are_escaped(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with lasting_output():
        print("5 × \N{GREEK SMALL LETTER ALPHA}, plain")
    monkeypatch.undo()
    assert stream.buffer.getvalue() == rb"5 \xd7 \u03b1, plain" + b"\n"


def test_a_process_started_without_streams_gives_their_numbers_to_no_file(tmp_path):
    """Otherwise the next opened file would get descriptor 1, and output would be written into it."""
    code = (
        "import os, sys\nfor number in (0, 1, 2): os.close(number)\nsys.stdout = sys.stderr = None\n"
        "from lightning_llm.base.terminal import open_standard_streams\nopen_standard_streams()\n"
        f"file = open({str(tmp_path / 'mine')!r}, 'w')\nos.write(1, b'printed')\n"
        "file.write(str([os.get_inheritable(number) for number in (0, 1, 2)]) + str(file.fileno() > 2))\n"
    )
    assert os.spawnl(os.P_WAIT, sys.executable, "python", "-c", code) == 0
    assert (tmp_path / "mine").read_text() == "[True, True, True]True"
