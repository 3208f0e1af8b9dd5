"""Signals between the start of the command and its end, where no run takes them: one line, the right exit code."""

import os
import signal
import sys

import pytest

from lightning_llm.__main__ import main
from lightning_llm.base import process, signals
from lightning_llm.base.at_start import is_command
from lightning_llm.base.errors import ConfigError, Problem, Terminated


@pytest.fixture(autouse=True)
def as_a_command(monkeypatch):
    """Handlers are restored, and received signals are forgotten."""
    before = {number: signal.getsignal(number) for number in signals.ENDING}
    monkeypatch.setattr(signals, "_received", 0)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", signals.ENDING)
def test_the_first_signal_ends_in_a_line_and_another_ends_at_once(number, monkeypatch, capsys):
    def interrupted(words):
        try:
            os.kill(os.getpid(), number)
        finally:  # where a second one would have given a traceback
            assert {signal.getsignal(each) for each in signals.ENDING} == {signal.SIG_DFL}

    monkeypatch.setattr("lightning_llm.cli.command_line.run_verb", interrupted)
    monkeypatch.setattr(sys, "argv", ["lightning-llm", "train"])
    for name in ("use_utf8", "leave_working_folder", "open_standard_streams", "take_process"):
        monkeypatch.setattr(f"lightning_llm.__main__.{name}", lambda: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert main() == 128 + number
    assert capsys.readouterr().err == (
        f"stopped by {number.name}; no step was interrupted, and saved files are unchanged\n"
    )


def test_an_import_that_makes_another_error_of_a_signal_is_a_stop(monkeypatch, capsys):
    def interrupted(words):
        try:
            with signals.early_signals(words):
                os.kill(os.getpid(), signal.SIGTERM)
        except Terminated as stop:
            raise ImportError("initialization failed") from stop  # as pybind11's modules do

    monkeypatch.setattr("lightning_llm.cli.command_line.run_verb", interrupted)
    assert main(["plan"]) == 143
    assert capsys.readouterr().err == "stopped by SIGTERM\n"


def test_during_imports_a_signal_ends_the_process_at_once(monkeypatch, capfd):
    ended = []

    def exit_at_once(code):
        ended.append(code)
        raise SystemExit

    monkeypatch.setattr(process, "_own_process", True)
    monkeypatch.setattr(os, "_exit", exit_at_once)
    with pytest.raises(SystemExit), signals.early_signals(["train"]), process.slow_imports():
        os.kill(os.getpid(), signal.SIGINT)
    assert ended == [130]
    assert capfd.readouterr().err == signals.stop_line(signal.SIGINT, ["train"])
    assert not process.is_importing()


def test_signals_that_are_ignored_at_the_start_stay_ignored():
    for number in signals.ENDING:
        signal.signal(number, signal.SIG_IGN)
    with signals.early_signals(["train"]), signals.raised_as_terminated():
        for number in signals.ENDING:
            os.kill(os.getpid(), number)
    assert {signal.getsignal(number) for number in signals.ENDING} == {signal.SIG_IGN}


@pytest.mark.parametrize(
    ("variables", "number", "speaks"),
    [
        ({"RANK": "0"}, signal.SIGINT, True),
        ({"RANK": "1"}, signal.SIGINT, False),
        ({"SLURM_PROCID": "2"}, signal.SIGINT, False),
        ({"RANK": "0", "TORCHELASTIC_RUN_ID": "r"}, signal.SIGTERM, False),
    ],
)
def test_only_one_of_several_ranks_reports_a_signal(variables, number, speaks, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert bool(signals.stop_line(number, ["train"])) == speaks


def test_exceptions_without_a_signal_are_raised(monkeypatch):
    def fails(words):
        raise ValueError("a fault")

    monkeypatch.setattr("lightning_llm.cli.command_line.run_verb", fails)
    with pytest.raises(ValueError, match="a fault"):
        main(["plan"])
    assert signals.signal_of(ConfigError(Problem("key", "is wrong."))) == 0


def test_importing_the_package_changes_the_signals_of_the_command_alone(monkeypatch):
    processes = {
        ("/x/lightning-llm", ("python", "/x/lightning-llm", "train")): True,
        ("-m", ("python", "-u", "-P", "-m", "lightning_llm", "train")): True,
        ("-m", ("python", "-m", "pytest", "lightning_llm")): False,
        ("/x/mine.py", ("python", "/x/mine.py", "-m", "lightning_llm")): False,
        ("-c", ("python", "-c", "import lightning_llm")): False,
    }
    for (program, words), expected in processes.items():
        monkeypatch.setattr(sys, "argv", [program])
        monkeypatch.setattr(sys, "orig_argv", list(words))
        assert is_command() == expected, words
