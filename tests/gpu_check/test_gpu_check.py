"""gpu_check on a CPU: its words, its clock, its report, and how its checks run apart. 6 s."""

import json
import os
import time
import zipfile
from pathlib import Path

import pytest

from gpu_check import __main__ as gpu_check
from gpu_check import rows, wheels
from gpu_check.rows import Clock, Row


def test_without_a_gpu_every_check_says_so_and_nothing_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "DRIVER_FILES", ())
    assert gpu_check.main(["--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    (file,) = tmp_path.glob("*-no-gpu.json")
    found = json.loads(file.read_text())["checks"]
    assert list(found) == ["G1", "G2", "G3", "G4", "G5"]
    assert all(row["status"] == "not available" for each in found.values() for row in each["rows"])
    assert said.count("no NVIDIA driver") == 5
    assert gpu_check.main(["G2", "G4"]) == 0
    assert gpu_check.main(["G9"]) == 2


def test_the_budgets_fit_nine_minutes():
    assert sum(check.seconds for check in gpu_check.CHECKS.values()) <= 510
    names = list(gpu_check.CHECKS)
    assert gpu_check.budgets(names, 3.0) == {name: check.seconds for name, check in gpu_check.CHECKS.items()}
    for spent in (60, wheels.INSTALL_SECONDS):
        assert spent + sum(gpu_check.budgets(names, spent).values()) <= 535
    assert gpu_check.budgets(["G1"], wheels.INSTALL_SECONDS) == {"G1": gpu_check.CHECKS["G1"].seconds}
    for check in gpu_check.CHECKS.values():
        assert callable(__import__(f"gpu_check.{check.module}", fromlist=["check"]).check)


def test_a_check_runs_apart_and_says_what_is_missing_or_how_it_ended(monkeypatch):
    (row,) = gpu_check.run_apart("G1", {**dict(__import__("os").environ)}, seconds=120)
    assert (row.status, "finds no CUDA device" in row.note) == ("not available", True)
    (row,) = gpu_check.run_apart("G1", {}, seconds=0.01)
    assert "stopped after 0.01 s" in row.note
    monkeypatch.setattr(gpu_check.sys, "executable", "/bin/false")
    (row,) = gpu_check.run_apart("G1", {})
    assert (row.status, "exit code 1" in row.note) == ("error", True)


def test_a_package_that_is_not_there_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "lacking", lambda modules: ["hydra"])
    assert gpu_check.run_here("G5", 10, tmp_path / "rows") == 0
    (row,) = rows.read(tmp_path / "rows")
    assert row.status == "not available"
    assert "hydra not installed: put the wheels" in row.note
    assert wheels.lacking(("torch", "surely_not_there")) == ["surely_not_there"]


def test_what_breaks_is_reported_beside_what_was_found(tmp_path):
    def work():
        yield Row("first", 1.0)
        raise RuntimeError("no kernel\nimage")

    for row in rows.guarded("it", work):
        rows.append(tmp_path / "rows", row)
    with (tmp_path / "rows").open("a") as file:
        file.write('{"what": "torn')
    first, second = rows.read(tmp_path / "rows")
    assert first == Row("first", 1.0)
    rows.append(tmp_path / "rest", Row("far", float("inf")))
    assert '"inf"' in (tmp_path / "rest").read_text()
    assert rows.read(tmp_path / "rest") == [Row("far", float("inf"))]
    assert (second.status, second.note) == ("error", "RuntimeError: no kernel image")
    text = rows.table("G1", "title", [first, second])
    assert "measured" in text
    assert "RuntimeError" in text
    assert rows.read(tmp_path / "none") == []


def test_off_rows_make_the_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "DRIVER_FILES", ("/",))
    for status, code in (("off", 1), ("error", 1), ("ok", 0), ("not available", 0)):
        found = [Row("device", None, note="NVIDIA H100 80GB HBM3, 9.0"), Row("x", 1.0, status=status)]
        monkeypatch.setattr(gpu_check, "run_apart", lambda name, environment, seconds, found=found: found)
        assert gpu_check.main(["G1", "--out", str(tmp_path)]) == code
    (file,) = tmp_path.glob("*-nvidia-h100-80gb-hbm3.json")
    assert json.loads(file.read_text())["machine"]["device"] == "NVIDIA H100 80GB HBM3"


def test_what_was_measured_is_kept(tmp_path, monkeypatch, capsys):
    """A single check takes its own place in the day's file, and a run that dies leaves the checks before."""
    monkeypatch.setattr(gpu_check, "DRIVER_FILES", ("/",))
    monkeypatch.setattr(gpu_check, "wheel_folder", lambda given, root: None)
    device = Row("device", None, note="NVIDIA H100, 9.0")

    def of(value):
        return lambda name, environment, seconds: [device, Row(name, value)]

    def in_the_file():
        (file,) = tmp_path.iterdir()

        def refuse(word):
            raise ValueError(f"{word} is no JSON")

        checks = json.loads(file.read_text(), parse_constant=refuse)["checks"]
        return {name: check["rows"][1]["value"] for name, check in checks.items()}

    monkeypatch.setattr(gpu_check, "run_apart", of(1.0))
    assert gpu_check.main(["--out", str(tmp_path)]) == 0
    monkeypatch.setattr(gpu_check, "run_apart", of(float("nan")))
    assert gpu_check.main(["G2", "--out", str(tmp_path)]) == 0
    assert in_the_file() == {"G1": 1, "G2": "nan", "G3": 1, "G4": 1, "G5": 1}

    def dies_in_g4(name, environment, seconds):
        if name == "G4":
            raise KeyboardInterrupt
        return [device, Row(name, float("-inf"))]

    monkeypatch.setattr(gpu_check, "run_apart", dies_in_g4)
    with pytest.raises(KeyboardInterrupt):
        gpu_check.main(["--out", str(tmp_path)])
    assert in_the_file() == {"G1": "-inf", "G2": "-inf", "G3": "-inf", "G4": 1, "G5": 1}


GRANDCHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60); open('{file}.lived', 'w')"])
open("{file}", "w").write(str(child.pid))
{then}
"""


@pytest.mark.parametrize(("then", "status"), [("time.sleep(60)", "not available"), ("1 / 0", "error")])
def test_a_check_ends_with_all_that_it_started(then, status, tmp_path, monkeypatch):
    (tmp_path / "gpu_check.py").write_text(GRANDCHILD.format(file=tmp_path / "pid", then=then))
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    (row,) = gpu_check.run_apart("G1", {**os.environ, "PYTHONPATH": str(tmp_path)}, seconds=3)
    assert row.status == status
    stat = Path("/proc", (tmp_path / "pid").read_text(), "stat")
    deadline = time.monotonic() + 5
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":  # ended, if not reaped
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not (tmp_path / "pid.lived").exists()  # ended, not waited for


def test_the_clock():
    seconds = iter([0.0, 1.0, 9.5, 11.0])
    clock = Clock(10, lambda: next(seconds))
    assert clock.allows(5)
    assert not clock.allows(5)
    assert clock.left == 0


def test_wheels_are_found_and_installed_without_a_network(tmp_path, monkeypatch):
    monkeypatch.delenv("GPU_CHECK_WHEELS", raising=False)
    assert wheels.wheel_folder(None, tmp_path) is None
    folder = tmp_path / "carry"
    folder.mkdir()
    info = "tiny_thing-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_thing-1.0-py3-none-any.whl", "w") as made:
        made.writestr("tiny_thing.py", "answer = 42\n")
        made.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n")
        made.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{info}/RECORD", "")
    assert wheels.wheel_folder(None, tmp_path) == folder
    assert wheels.wheel_folder(str(tmp_path), tmp_path) is None
    monkeypatch.setattr(wheels.tempfile, "gettempdir", lambda: str(tmp_path))
    site, said = wheels.install(folder)
    assert (site / "tiny_thing.py").read_text() == "answer = 42\n"
    assert said.startswith("1 wheels of")
    assert wheels.install(folder) == (site, f"{said}, installed earlier")
    (folder / "broken-1.0-py3-none-any.whl").write_text("no archive")
    site, said = wheels.install(folder)
    assert site is None
    assert "could not be installed" in said
