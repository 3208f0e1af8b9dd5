"""gpu_check on a CPU: its arguments, clock, journal, and checks in separate processes that continue. 8 s."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from gpu_check import __main__ as gpu_check
from gpu_check import check_process, checks, machine
from gpu_check.checks import CHECKS, MFU, NATIVE_STEP, Check, closing, seconds_for
from gpu_check.journal import Clock, Item, Journal, OutOfTimeError, Row, journal_for, missing
from gpu_check.machine import Machine, machine_here
from lightning_llm.base import hardware

HERE = Machine("NVIDIA H100 80GB HBM3", "580.1", "2.11.0+cu130", "2.20.2")


class FakeTime:
    """A clock advanced by the test."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "rows.jsonl", HERE, "abc")


def taking(clock, seconds, *found):
    def work():
        clock.seconds += seconds
        yield from found

    return work


def test_the_command_starts_without_the_packages_that_wheels_may_bring():
    code = "import sys, gpu_check.__main__; sys.exit(bool({'torch', 'pydantic', 'yaml'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=check_process.ROOT, check=False).returncode == 0


def statuses(journal, check="c"):
    return {item: [row.status for row in found] for item, found in journal.results(check).items()}


def test_without_a_gpu_every_check_is_not_available_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hardware, "DRIVER_FILES", ())
    assert gpu_check.main(["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("not available") == len(CHECKS)
    assert list(tmp_path.iterdir()) == []
    assert gpu_check.main(["speed", "nothing"]) == 2
    assert "unknown check nothing. Use one of agreement, speed" in capsys.readouterr().err


def test_shares_of_all_checks_fit_into_eleven_minutes():
    names = list(CHECKS)
    assert names[:5] == ["agreement", "speed", "emulation", "memory", "curves"]
    left, taken = checks.TOTAL_SECONDS, []
    for name in names:
        taken.append(seconds_for(name, names, left))
        left -= taken[-1]
    assert taken == pytest.approx([each.share for each in CHECKS.values()])
    assert sum(taken) == pytest.approx(checks.TOTAL_SECONDS) == pytest.approx(645)
    early = seconds_for("speed", names, 520)  # agreement needed 10 s alone: the others have the rest
    assert early == pytest.approx(520 * CHECKS["speed"].share / (645 - CHECKS["agreement"].share))
    assert seconds_for("steps", names, 7.0) == 7
    for check in CHECKS.values():
        assert callable(__import__(check.module, fromlist=["items"]).items)


def test_items_without_enough_time_are_cut_off_and_measured_by_the_next_call(journal):
    now = FakeTime()
    items = [
        Item("first", 5, taking(now, 6, Row("one", 1.0))),
        Item("second", 5, taking(now, 1, Row("two", 2.0))),
        Item("third", 1, taking(now, 1, Row("three", 3.0))),
    ]
    check_process.measure("c", items, journal, Clock(10, now))
    assert statuses(journal) == {"first": ["measured"], "second": ["cut off"], "third": ["measured"]}
    assert journal.results("c")["second"][0].note == "4 s were left, it takes about 5 s"
    assert "1 cut off" in closing(journal, ("c",))[-2]
    assert closing(journal, ("c",))[-1].startswith("the next `make gpu-check` continues")
    before = now.seconds
    check_process.measure("c", items, journal, Clock(10, now))
    assert now.seconds - before == 1  # the second alone
    assert statuses(journal) == {key: ["measured"] for key in ("first", "second", "third")}
    check_process.measure("c", items, journal, Clock(100, now), again=True)
    assert now.seconds - before == 1 + 8


def test_a_planted_failure_is_a_row_and_ends_nothing(journal):
    now, broken = FakeTime(), [True]

    def breaks():
        yield Row("half", 0.5)
        if broken[0]:
            raise RuntimeError("no kernel\nimage")

    def slow():
        raise OutOfTimeError("the run had 3 steps")
        yield

    items = [Item("bad", 1, breaks), Item("slow", 1, slow), Item("good", 1, taking(now, 1, Row("g", 1.0)))]
    check_process.measure("c", items, journal, Clock(10, now))
    assert statuses(journal) == {"bad": ["measured", "error"], "slow": ["cut off"], "good": ["measured"]}
    assert journal.results("c")["bad"][1].note == "RuntimeError: no kernel image"
    broken[0] = False
    items.append(Item("new", 1, taking(now, 1, Row("n", 1.0))))
    check_process.measure("c", items, journal, Clock(10, now))
    order = [json.loads(line) for line in journal.file.read_text().splitlines()]
    assert [line["item"] for line in order if line.get("event") == "began"][3:] == ["new", "bad", "slow"]
    assert statuses(journal)["bad"] == ["measured"]


def test_a_better_result_is_not_lost_to_a_later_one_that_was_cut_off(journal):
    now = FakeTime()
    check_process.measure("c", [Item("one", 1, taking(now, 1, Row("x", 1.0)))], journal, Clock(10, now))
    check_process.measure("c", [Item("one", 20, taking(now, 1, Row("x", 2.0)))], journal, Clock(10, now), again=True)
    assert journal.value("c", "x") == 1
    check_process.measure("c", [Item("one", 1, taking(now, 1, Row("x", 3.0)))], journal, Clock(10, now), again=True)
    assert journal.value("c", "x") == 3
    assert journal.value("c", "y") is None


def test_rows_have_their_machine_and_those_of_others_are_skipped(journal, tmp_path):
    journal.begin("c", "one")
    journal.add("c", "one", Row("far", float("inf"), "s", "off", "why"))
    journal.end("c", "one", 1.26)
    with journal.file.open("a") as file:
        file.write('{"check": "c", "item": "tor')
    other = Journal(journal.file, Machine("NVIDIA H100 80GB HBM3", "580.1", "2.13.0", None))
    other.begin("c", "two")
    other.add("c", "two", Row("x", 1.0))
    journal.leave_out("c", "three", Row("x", None, "", "cut off", ""))

    def refuse(word):
        raise ValueError(f"{word} is no JSON")

    lines = journal.file.read_text().splitlines()
    row = json.loads(lines[1], parse_constant=refuse)
    assert {row[key] for key in ("device", "driver", "torch", "transformer_engine", "commit")} == {
        "NVIDIA H100 80GB HBM3", "580.1", "2.11.0+cu130", "2.20.2", "abc"
    }  # fmt: skip
    assert (row["value"], json.loads(lines[2])["seconds"]) == ("inf", 1.3)
    assert journal.results("c")["one"] == [Row("far", float("inf"), "s", "off", "why")]
    assert list(journal.results("c")) == ["one", "three"]
    assert list(other.results("c")) == ["two"]


def test_a_call_continues_with_the_newest_rows_of_its_machine(tmp_path):
    out, results = tmp_path / "out", tmp_path / "results"
    results.mkdir()
    fresh = journal_for(HERE, out, results, None)
    assert fresh.file.parent == out
    assert fresh.file.name.endswith("-nvidia-h100-80gb-hbm3.jsonl")
    for day, of in (("2026-01-01", HERE), ("2026-01-02", HERE), ("2026-01-03", Machine(HERE.device, "1", "2", None))):
        Journal(results / f"{day}-{HERE.file_part}.jsonl", of).leave_out("c", day, Row("x", 1.0))
    taken = journal_for(HERE, out, results, None)
    assert taken.file == out / f"2026-01-02-{HERE.file_part}.jsonl"
    assert list(taken.results("c")) == ["2026-01-02"]
    taken.leave_out("c", "more", Row("x", 1.0))
    assert list(journal_for(HERE, out, results, None).results("c")) == ["2026-01-02", "more"]


PLANTED = """
import os, subprocess, sys, time
from pathlib import Path
from gpu_check.journal import Item, Row
CALLS, FOLDER = os.environ["PLANTED_CALLS"].split(), Path(__file__).parent

def items(call):
    def quick():
        yield Row("quick", 1.0)

    def hangs():
        yield Row("begun", 1.0)
        if (FOLDER / "mended").exists():
            return
        if "spoils" in CALLS:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(60); open('{FOLDER}/lived', 'w')"])
        (FOLDER / "pid").write_text(f"{child.pid} {os.getpid()}")
        os._exit(7) if "dies" in CALLS else time.sleep(60)

    def behind():
        yield Row("by", float(os.getpid()))

    return [Item("quick", 0.1, quick), Item("hangs", 0.1, hangs), Item("behind", 0.1, behind)]
"""
CHECK = Check("planted", "planted_check", 1, ("json",))


@pytest.fixture
def planted(tmp_path):
    """The environment of processes that find a check with a second item that hangs or dies."""
    (tmp_path / "planted_check.py").write_text(PLANTED)
    return {**os.environ, "PYTHONPATH": str(tmp_path), "PLANTED_CALLS": "hangs"}


def assert_ended(pid_file, *, within=5):
    deadline = time.monotonic() + within
    for pid in pid_file.read_text().split():
        stat = Path("/proc", pid, "stat")
        while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":  # ended, if not reaped
            assert time.monotonic() < deadline
            time.sleep(0.02)
    assert not (pid_file.parent / "lived").exists()  # ended, not waited for


def test_a_check_ends_with_its_children_and_the_next_call_continues(planted, journal, tmp_path):
    check_process.run_in_process("c", CHECK, journal, planted, seconds=2.5)
    assert statuses(journal) == {"quick": ["measured"], "hangs": ["measured", "cut off"], "behind": ["cut off"]}
    assert_ended(tmp_path / "pid")
    assert journal.results("c")["hangs"][1].note == "stopped after 2 s"
    (tmp_path / "mended").touch()
    lines = len(journal.file.read_text().splitlines())
    check_process.run_in_process("c", CHECK, journal, planted, seconds=60)
    assert statuses(journal) == {name: ["measured"] for name in ("quick", "hangs", "behind")}
    later = [json.loads(line) for line in journal.file.read_text().splitlines()[lines:]]
    began = [line["item"] for line in later if line.get("event") == "began"]
    assert began == ["behind", "hangs"]  # quick has its row; what hung goes last


@pytest.mark.parametrize(
    ("how", "note"),
    [("dies", "exit code 7: without a word"), ("spoils", "RuntimeError: CUDA error: an illegal memory access was")],
)
def test_another_process_continues_after_the_item_that_broke_one(how, note, planted, journal, tmp_path):
    """A crash, or an error after which the device is of no more use to a process: a row, and the rest is made."""
    check_process.run_in_process("c", CHECK, journal, {**planted, "PLANTED_CALLS": how}, seconds=60)
    assert statuses(journal) == {"quick": ["measured"], "hangs": ["measured", "error"], "behind": ["measured"]}
    assert journal.results("c")["hangs"][1].note.startswith(note)
    if how == "dies":
        assert_ended(tmp_path / "pid")
    assert journal.plans("c") == 2
    began = [json.loads(line)["item"] for line in journal.file.read_text().splitlines() if '"began"' in line]
    assert began == ["quick", "hangs", "behind"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_call_that_is_ended_itself_keeps_its_rows_and_leaves_nothing_behind(number, code, planted, tmp_path):
    """As a machine's time limit ends it: a signal to `python -m gpu_check` alone."""
    script = f"""
import sys
sys.path.insert(0, {str(check_process.ROOT)!r})
from gpu_check import __main__ as call, checks, machine
call.machine_here = lambda environment: machine.Machine("d", "1", "2", None)
checks.CHECKS.clear()
checks.CHECKS["c"] = checks.Check("planted", "planted_check", 1, ())
sys.exit(call.main(["--out", {str(tmp_path / "out")!r}]))
"""
    call = subprocess.Popen([sys.executable, "-c", script], env=planted, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    call.send_signal(number)
    assert call.wait(20) == code
    assert_ended(tmp_path / "pid")
    (file,) = (tmp_path / "out").glob("*.jsonl")
    found = Journal(file, Machine("d", "1", "2", None)).results("c")
    assert {item: [row.value for row in each] for item, each in found.items()} == {"quick": [1], "hangs": [1]}


def test_a_check_that_cannot_start_reports_the_reason(planted, journal):
    check_process.run_in_process(
        "c", Check("", "planted_check", 1, ("surely_not_there",)), journal, planted, seconds=60
    )
    (row,) = journal.results("c")[check_process.WHOLE]
    assert (row.status, "surely_not_there not installed: add their wheels" in row.note) == ("not available", True)
    check_process.run_in_process("c", Check("", "no_such_module", 1, ()), journal, planted, seconds=60)
    (row,) = journal.results("c")[check_process.WHOLE]
    assert (row.status, row.note) == ("error", "exit code 1: ModuleNotFoundError: No module named 'no_such_module'")


def test_the_closing_lines_say_met_or_not_met(journal):
    def closes():
        return closing(journal, ("speed",))[1:3]

    assert all("not measured (no rows yet)" in line for line in closes())
    journal.leave_out("speed", "native", missing(NATIVE_STEP, "no Transformer Engine"))
    assert "native FP8 over bf16 at 1B >= 1.3 times: not measured (no Transformer Engine)" in closes()[1]
    journal.begin("speed", "bf16")
    journal.add("speed", "bf16", Row(f"{MFU} train", 54.9, "%"))
    assert closes()[0].endswith(">= 55 %: not met, 54.9 % (train)")
    journal.add("speed", "bf16", Row(f"{MFU} our model in a loop", 55.2, "%"))
    assert closes()[0].endswith("met, 55.2 % (our model in a loop)")
    for name, ratio in (("fp8_delayed", 1.31), ("fp8_current", 1.2)):
        journal.begin("speed", name)
        journal.add("speed", name, Row(f"{NATIVE_STEP} {name}", ratio, "times"))
    assert closes()[1].endswith(": met, 1.31 times (fp8_delayed)")
    assert (
        closing(journal, ())[0] == "NVIDIA H100 80GB HBM3, driver 580.1, torch 2.11.0+cu130, Transformer Engine 2.20.2"
    )


def test_rows_that_are_off_set_the_exit_code_and_every_check_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(gpu_check, "wheel_folder", lambda given, root: None)
    monkeypatch.setattr(gpu_check, "machine_here", lambda environment: HERE)
    for status, code in (("off", 1), ("error", 1), ("ok", 0), ("cut off", 0)):

        def stands_for(name, check, journal, environment, seconds, again, status=status):
            journal.plan(name, ["x"], ["x"])
            journal.leave_out(name, "x", Row("x", 1.0, status=status if name == "memory" else "ok"))

        monkeypatch.setattr(gpu_check, "run_in_process", stands_for)
        assert gpu_check.main(["--out", str(tmp_path)]) == code
        said = capsys.readouterr().out
        assert [line.split()[0] for line in said.splitlines() if line.split("  ")[0] in CHECKS] == list(CHECKS)
        assert said.count("target: ") == 2


@pytest.mark.full
def test_the_machine_is_described_by_torch_in_a_separate_process(monkeypatch):
    monkeypatch.setattr(hardware, "DRIVER_FILES", ("/",))
    assert "finds no CUDA device" in machine_here(dict(os.environ))
    monkeypatch.setattr(machine.sys, "executable", "/bin/false")
    assert machine_here({}) == "torch could not be asked: without a word"


def test_the_clock():
    now = FakeTime()
    clock = Clock(10, now)
    assert clock.allows(10)
    now.seconds = 6
    assert not clock.allows(5)
    now.seconds = 11
    assert clock.left == 0


def test_wheels_are_found_and_installed_without_a_network(tmp_path, monkeypatch):
    monkeypatch.delenv("GPU_CHECK_WHEELS", raising=False)
    assert machine.wheel_folder(None, tmp_path) is None
    folder = tmp_path / "carry"
    folder.mkdir()
    info = "tiny_thing-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_thing-1.0-py3-none-any.whl", "w") as made:
        made.writestr("tiny_thing.py", "answer = 42\n")
        made.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{info}/RECORD", "")
    assert machine.wheel_folder(None, tmp_path) == folder
    assert machine.wheel_folder(str(tmp_path), tmp_path) is None
    monkeypatch.setattr(machine.tempfile, "gettempdir", lambda: str(tmp_path))
    site, said = machine.install(folder)
    assert (site / "tiny_thing.py").read_text() == "answer = 42\n"
    assert said.startswith("1 wheels of")
    assert machine.install(folder) == (site, f"{said}, installed earlier")
    (folder / "broken-1.0-py3-none-any.whl").write_text("no archive")
    site, said = machine.install(folder)
    assert site is None
    assert "could not be installed" in said
    assert machine.lacking(("torch", "surely_not_there")) == ["surely_not_there"]
