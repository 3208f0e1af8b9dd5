"""callbacks=prometheus against metrics.jsonl, by the reference parser; ports, files, ends. 3 seconds."""

import errno
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lightning_llm.__main__ import main
from lightning_llm.callbacks.prometheus import Prometheus
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import training_hash
from lightning_llm.tracking import prometheus
from lightning_llm.tracking.files import read_records
from lightning_llm.tracking.prometheus import FAMILIES, PREFIX, MetricsPublisher, RunMetrics, Wishes, metric_of
from lightning_llm.tracking.run_state import JOB_VARIABLE
from lightning_llm.train.run_folder import RunFolder
from tests import own_callbacks
from tests.protocol_module import TinyModule, fit, make_config

IDENTITY = {"experiment": "trial", "run": "first"}


def parsed(text: str) -> dict[str, dict[str, float]]:
    """Return {name without prefix: {value of the further label, or "": value}}."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for each in family.samples:
            assert each.name.startswith(PREFIX)
            own = [value for name, value in sorted(each.labels.items()) if name not in IDENTITY]
            found.setdefault(each.name.removeprefix(PREFIX), {})[own[0] if own else ""] = each.value
    return found


def scraped(address: str | None) -> dict[str, dict[str, float]]:
    with urlopen(f"http://{address}/metrics", timeout=60) as answer:
        return parsed(answer.read().decode())


def is_free(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as trial:
        return trial.connect_ex((host, int(port))) == errno.ECONNREFUSED


def no_thread_is_left() -> bool:
    return not [each for each in threading.enumerate() if each.name == "prometheus"]


def make_metrics(**facts: Any) -> RunMetrics:
    return RunMetrics(IDENTITY, {"recipe": "quickstart"}, 8, facts)


@pytest.fixture
def publish(tmp_path: Path) -> Iterator[Any]:
    """Return a function that starts a publisher of metrics without a run."""
    made: list[MetricsPublisher] = []

    def start(metrics: RunMetrics, port: int | None = 0, textfile: Path | None = None, **more: Any) -> MetricsPublisher:
        wishes = Wishes("127.0.0.1", port, textfile, None, more.pop("every_seconds", 600.0))
        arguments = {"run_dir": tmp_path, "saved": lambda: None, "name": "callbacks.prometheus", **more}
        made.append(MetricsPublisher(metrics, wishes, **arguments))
        made[-1].start()
        return made[-1]

    yield start
    for each in made:
        each.stop()


def test_a_run_is_scraped_and_its_file_says_that_it_ended(tmp_path, small_run, capsys):
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    words = small_run(
        tmp_path, "callbacks=[forgetting,prometheus]", "callbacks.sample=null", "callbacks.prometheus.port=0",
        f"callbacks.prometheus.textfile={metrics}", f"callbacks.prometheus.targets={metrics}",
        f"+callbacks.look={{_target_: tests.own_callbacks.Scrapes, targets: '{metrics}', step: 2}}",
        "+callbacks.own={_target_: tests.own_callbacks.Remembers}",
    )  # fmt: skip
    own_callbacks.Scrapes.texts.clear()
    assert main(["train", *(word for word in words if word != "callbacks=none")]) == 0
    early, late = map(parsed, own_callbacks.Scrapes.texts)
    assert early["step"] == {"": 1}  # the second step's record is not written yet

    records = list(read_records(tmp_path / "run" / "metrics.jsonl"))
    numbers = {key: value for each in records for key, value in each.items() if isinstance(value, int | float)}
    numbers["timing_warmup"] = True
    for key in numbers.keys() - {"time"}:
        name, label = metric_of(key)
        assert late[name][label] == pytest.approx(numbers[key] * FAMILIES[name].scale, rel=1e-15), key
    assert {"loss", "tflops_per_second", "val_loss/jsonl", "forgetting/jsonl", "own/remembered"} <= numbers.keys()
    assert late["loss"] == {"": records[-2]["loss"]}
    assert late["val_loss_by_source"] == {"jsonl": records[-1]["val_loss"]} == {"jsonl": late["val_loss"][""]}
    assert late["flops_per_second"][""] == pytest.approx(records[-2]["tflops_per_second"] * 1e12)
    assert late["record"] == {"own/remembered": 6, "own/validations": 2}
    assert late["last_record_timestamp_seconds"] == {"": records[-1]["time"]}
    assert late["tokens_total"] == late["trained_tokens"] == {"": 6 * 4 * 32}
    assert (late["steps_total"][""], late["max_steps"][""], late["starts_total"][""]) == (6, 6, 1)
    assert late["running"] == {"": 1}
    assert late["disk_size_bytes"][""] == os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize

    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("scrape ")]
    assert is_free(line.removeprefix("scrape http://").removesuffix("/metrics"))
    assert no_thread_is_left()
    (file,) = metrics.iterdir()  # neither the targets nor anything half written
    last = parsed(file.read_text())
    assert (last["running"][""], last["end_status"], last["checkpoint_step"][""]) == (0, {"finished": 1}, 6)
    saved = tmp_path / "run" / "checkpoints" / "step=6" / "manifest.json"
    assert last["checkpoint_timestamp_seconds"][""] == pytest.approx(saved.stat().st_mtime, abs=1e-3)
    (info,) = [each for each in text_string_to_metric_families(file.read_text()) if each.name.endswith("run_info")]
    assert info.samples[0].labels.keys() - IDENTITY == {
        "recipe", "precision", "model", "config_hash", "device", "version",
    }  # fmt: skip
    assert last.keys() - {"end_status", "end_timestamp_seconds"} - late.keys() <= {"checkpoint_step"} | {
        "checkpoint_timestamp_seconds"
    }


def test_counters_and_values_by_hand():
    metrics = make_metrics(starts=3, rollbacks=[{}, {}], restarts=[{}])
    registry = CollectorRegistry()
    registry.register(metrics)
    told = lambda: parsed(generate_latest(registry).decode())  # noqa: E731
    assert told()["events_total"]["spike"] == told()["tokens_total"][""] == 0  # an increase is one from something
    assert "step" not in told()
    step = {"loss": 1.0, "lr": 0.1, "time": 5.0}
    metrics.take({"step": 5, "tokens": 500, **step, "timing_warmup": True})
    metrics.take({"step": 6, "tokens": 600, **step, "skipped": True, "event": "spike", "event/loss_score": 9.0})
    seen = told()
    assert (seen["tokens_total"][""], seen["trained_tokens"][""], seen["skipped_steps_total"][""]) == (200, 600, 1)
    assert (seen["events_total"]["spike"], seen["record"], seen["timing_warmup"][""]) == (1, {"event/loss_score": 9}, 0)
    metrics.take({"step": 6, "tokens": 600, "val_loss": math.nan, 'val_loss/a b"\\\n': math.inf, "time": 6.0})
    metrics.take({"step": 7, "tokens": 700, **step, "event": "odd", "event_action": "rollback", "words": ["x"]})
    seen = told()
    assert math.isnan(seen["val_loss"][""])
    assert seen["val_loss_by_source"] == {'a b"\\\n': math.inf}
    assert (seen["steps_total"][""], seen["tokens_total"][""], seen["events_total"]["odd"]) == (2, 200, 1)
    assert "record" not in seen  # an event's numbers go with the next record
    assert [seen[f"{name}_total"][""] for name in ("starts", "rollbacks", "restarts")] == [3, 2, 1]


def test_a_port_in_use_is_reported_once_and_used_when_free(publish, caplog):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        publisher = publish(make_metrics(), port, every_seconds=0.02)
        time.sleep(0.1)
        assert publisher.address is None
    deadline = time.monotonic() + 60
    while publisher.address is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert scraped(f"127.0.0.1:{port}")["running"] == {"": 1}
    (line,) = caplog.messages
    assert f"callbacks.prometheus: cannot listen on port {port} of 127.0.0.1 (Address already in use)" in line
    assert "Set callbacks.prometheus.port to another port, or to 0 for any free one. Training continues" in line


def test_a_process_that_is_forked_does_not_hold_the_port(publish):
    publisher = publish(make_metrics())
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    publisher.stop()
    try:
        assert is_free(str(publisher.address))
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_the_file_is_whole_whenever_it_is_read(tmp_path, publish, monkeypatch, caplog):
    file, metrics = tmp_path / "run.prom", make_metrics()
    for number in range(100):
        metrics.take({"step": 1, f"own/{number}": 1.0, "time": 0.0})
    publisher = publish(metrics, None, file, every_seconds=0.001)
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    texts: list[bytes] = []
    while (len(texts) < 300 or len(set(texts)) == 1) and time.monotonic() < deadline:
        texts.append(file.read_bytes())
    assert len(set(texts)) > 1
    assert {text.count(b"lightning_llm_record{") for text in texts} == {100}
    assert all(text.endswith(b"\n") and b"disk_size_bytes" in text for text in texts)
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        write(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    while not caplog.messages and time.monotonic() < deadline:
        time.sleep(0.01)
    publisher.stop()
    assert len(parsed(file.read_text())["record"]) == 100
    assert caplog.messages == [
        "callbacks.prometheus: the text file failed (No space left on device). Training continues, and it is retried"
    ]


def test_a_disk_that_is_away_holds_up_nothing(publish, monkeypatch, caplog):
    monkeypatch.setattr(prometheus, "CLOSE_SECONDS", 0.05)
    back = threading.Event()
    metrics = make_metrics()
    publisher = publish(metrics, saved=lambda: back.wait(60) and None)
    metrics.take({"step": 1, "loss": 2.0, "time": 0.0})
    assert scraped(publisher.address)["loss"] == {"": 2}
    publisher.stop()
    assert is_free(str(publisher.address))
    assert "not waiting" in caplog.text
    back.set()
    publisher._thread.join(60)
    assert no_thread_is_left()


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_an_unfinished_run_is_reported(status, tmp_path):
    config = make_config(tmp_path)
    error = RuntimeError("boom") if status == "failed" else type("Stopped", (BaseException,), {})()
    callback = Prometheus(port=0, textfile=str(tmp_path / "run.prom"))
    with pytest.raises(type(error)):
        fit(TinyModule(config, fail_at=(4, error)), [callback, RunFolder(Path(config.run.dir), [callback])])
    told = parsed((tmp_path / "run.prom").read_text())
    assert (told["running"], told["end_status"], told["step"]) == ({"": 0}, {status: 1}, {"": 3})
    assert no_thread_is_left()


def test_jobs_of_a_sweep_have_ports_and_files_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv(JOB_VARIABLE, "1")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        jobs = [Prometheus(port=port, textfile=str(tmp_path / "one.prom")) for _ in range(2)]
        for name, job in zip("ab", jobs, strict=True):
            folder = tmp_path / name
            folder.mkdir()
            module = TinyModule(make_config(tmp_path, run={"name": name, "dir": str(folder)}))
            job.setup(None, module, "fit")
            job.open({}, None)
        addresses = {job._publisher.address for job in jobs}
        assert len(addresses) == 2
        assert None not in addresses
    for job in jobs:
        job.close("finished", "", {})
    assert {file.name for file in tmp_path.glob("*.prom*")} == {
        "lightning_llm-trial-a.prom", "lightning_llm-trial-b.prom",
    }  # fmt: skip


def test_invalid_arguments_are_rejected_and_the_hash_does_not_change(tmp_path, small_run, monkeypatch, capsys):
    words = [word for word in small_run(tmp_path, "~callbacks.sample") if word != "callbacks=none"]
    plain, observed = (compose_config([*words, f"callbacks={name}"]) for name in ("default", "prometheus"))
    assert training_hash(plain) == training_hash(observed)
    more = ["callbacks=prometheus", "callbacks.prometheus.port=70000", "callbacks.prometheus.every_seconds=0"]
    monkeypatch.setattr("lightning_llm.callbacks.prometheus.find_spec", lambda name: None)
    assert main(["train", *words, *more]) == 2
    told = capsys.readouterr().err
    assert "callbacks.prometheus._target_: needs the package prometheus_client, which is missing" in told
    assert "pip install 'lightning-llm[prometheus]'" in told
    assert "callbacks.prometheus.port=70000: must be 0 (any free port) to 65535, or null" in told
    assert "callbacks.prometheus.every_seconds=0: must be at least 0.1." in told
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_real_run_that_is_ended_leaves_no_port(number, tmp_path, small_run):
    words = small_run(
        tmp_path, "callbacks=prometheus", "callbacks.sample=null", "trainer.max_steps=100000", "data.num_workers=1",
        "callbacks.prometheus.port=0", f"callbacks.prometheus.textfile={tmp_path}",
        f"callbacks.prometheus.targets={tmp_path}", "callbacks.prometheus.every_seconds=0.2", "schedule.warmup_steps=2",
    )  # fmt: skip
    command = [sys.executable, "-m", "lightning_llm", "train", *(word for word in words if word != "callbacks=none")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    address = None
    while time.monotonic() < deadline:
        if address is None and (found := list(tmp_path.glob("*.json"))):
            ((address,),) = (each["targets"] for each in json.loads(found[0].read_text()))
        if address and scraped(address).get("step", {"": 0})[""] > 3:
            break
        time.sleep(0.1)
    process.send_signal(number)
    process.wait(60)
    assert is_free(str(address))
    (file,) = tmp_path.glob("*.prom")
    told = parsed(file.read_text())
    if number == signal.SIGTERM:
        assert (told["running"], told["end_status"]) == ({"": 0}, {"stopped": 1})
        assert not list(tmp_path.glob("*.json"))
    else:
        assert told["running"] == {"": 1}
        assert time.time() - told["heartbeat_timestamp_seconds"][""] < 60
