"""The progress line and the sample."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_llm.base.terminal import escaped, excerpt, new_console
from lightning_llm.callbacks import progress
from lightning_llm.callbacks.progress import ProgressLine
from lightning_llm.callbacks.sample import Sample
from lightning_llm.callbacks.throughput import Throughput
from lightning_llm.config.schema import Config
from lightning_llm.tracking.final_figures import draw_losses
from lightning_llm.tracking.run_state import JOB_VARIABLE
from lightning_llm.tracking.sweep_file import title_of
from lightning_llm.train.run_folder import RunFolder
from tests.protocol_module import TinyModule, fit, make_config


def test_plain_lines_where_there_is_no_terminal(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    module = TinyModule(config)
    fit(module, [Throughput(), ProgressLine(line_seconds=0.0)])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"step 1/6 | loss {module.true_losses[0]:.4f} | ")
    assert " tokens/s" in printed[0]
    assert printed[1].endswith(" left")
    assert printed[3] == "step 3 | validation loss 2.9700 (code 2.0000, prose 2.0000)"
    assert len(printed) == 8
    assert not any("\x1b" in line for line in printed)


def test_plain_lines_come_no_more_often_than_asked(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    fit(TinyModule(config), [ProgressLine(line_seconds=1000.0)])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in printed] == ["step 3", "step 6/6", "step 6"]


def test_the_time_left_leaves_out_what_the_first_steps_pay_for(config, capsys, monkeypatch):
    class Clock(pl.Callback):
        now = 0.0
        seconds = (60.0, 31.0, 1.0, 1.0, 1.0, 1.0)

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            self.now += self.seconds[pl_module.completed_steps - 1]

        def on_validation_batch_start(self, *_: Any) -> None:
            self.now += 5.0

    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    fit(TinyModule(config), [clock, ProgressLine(line_seconds=0.0)])
    steps = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    left = {words[0]: words[-1] for words in steps if words[-1].endswith(" left")}
    assert left == {
        "step 2/6": "0:02:04 left",  # 4 steps of 31 s
        "step 3/6": "0:00:48 left",  # 3 of (31 + 1) / 2
        "step 4/6": "0:00:07 left",  # 2 of the median, 1 s, and the last validation
        "step 5/6": "0:00:06 left",
        "step 6/6": "0:00:05 left",
    }


def test_a_bar_on_a_terminal_is_taken_down(
    config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    fit(TinyModule(config), [ProgressLine(refresh_seconds=0.0)])
    printed = capsys.readouterr().out
    assert "step 6/6 | loss" in printed
    assert "validation loss 2.9400" in printed
    assert printed.count("\x1b[?25l") == printed.count("\x1b[?25h") == 1  # cursor hidden, and shown again


def test_a_bar_is_taken_down_when_the_run_fails(
    config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(RuntimeError):
        fit(TinyModule(config, fail_at=(3, RuntimeError())), [ProgressLine(refresh_seconds=0.0)])
    assert "\x1b[?25h" in capsys.readouterr().out


class WatchedSample(Sample):
    """Keeps the global random state and the model's mode from before and after."""

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        before = torch.get_rng_state(), pl_module.model.training
        super().on_fit_end(trainer, pl_module)
        self.states = [before, (torch.get_rng_state(), pl_module.model.training)]


def test_the_sample_is_written_and_the_same_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for name in ("first", "second"):
        config = make_config(tmp_path, run={"dir": str(tmp_path / name)})
        sample = WatchedSample(prompt="badge", max_new_tokens=20, top_k=3)
        fit(TinyModule(config), [sample, RunFolder(tmp_path / name)])
        (random_before, mode_before), (random_after, mode_after) = sample.states
        assert torch.equal(random_before, random_after)
        assert mode_before is mode_after
        texts.append((tmp_path / name / "sample.txt").read_text())
    assert texts[0] == texts[1]
    assert texts[0].startswith("badge")
    assert len(texts[0]) == 25
    assert texts[0] in capsys.readouterr().out


def test_an_empty_prompt_starts_a_document(config: Config) -> None:
    fit(TinyModule(config), [Sample(max_new_tokens=9), RunFolder(Path(config.run.dir))])
    assert len(Path(config.run.dir, "sample.txt").read_text()) == 9


def test_a_sample_is_short_on_a_terminal_and_one_line_among_jobs(
    config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"line {number}\n" for number in range(60))
    monkeypatch.setattr(Sample, "_generate", lambda *_: text)
    file = Path(config.run.dir, "sample.txt")
    fit(TinyModule(config), [Sample(), RunFolder(file.parent)])
    printed = capsys.readouterr().out
    assert (printed.count("line "), "48 more lines in" in printed) == (12, True)
    monkeypatch.setenv(JOB_VARIABLE, "3")
    fit(TinyModule(config), [Sample()])
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "line 0" in each]
    assert line.startswith("sample line 0 line 1 ")
    assert line.endswith(f" ...  ({file})")
    assert len(line) < 200 + len(str(file))
    assert file.read_text() == text


def test_a_sample_cannot_drive_the_terminal_nor_flood_it() -> None:
    text = "a\tb\x1b]0;title\x07\n" + 180 * " \n" + "\r\x9b31m\u202eno\x0e\x18\x7f\ud800 caf\u00e9\n"
    shown, left_out = excerpt(text)
    assert shown == "a\tb\\x1b]0;title\\x07\n\n\\x0d\\x9b31m\\u202eno\\x0e\\x18\\x7f\\ud800 caf\u00e9"
    assert left_out == 0
    assert escaped(text).encode().decode().count("\n") == text.count("\n")  # whole, and it can be written
    assert excerpt("\n".join(map(str, range(100)))) == ("\n".join(map(str, range(40))), 60)
    shown, _ = excerpt("long " * 1000)
    assert len(shown) == 404
    for number in [*range(32), *range(127, 160)]:
        assert escaped(chr(number)) == (chr(number) if chr(number) in "\n\t" else f"\\x{number:02x}")


def test_a_sample_that_fails_does_not_fail_the_run(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    fit(TinyModule(config), [Sample(temperature=-1.0), RunFolder(Path(config.run.dir))])
    assert "no sample was generated: ValueError: temperature=-1.0" in caplog.text
    assert '"status": "finished"' in Path(config.run.dir, "summary.json").read_text()


def test_a_line_has_the_mean_speed_since_the_last_one(config, capsys, monkeypatch):
    """Steps of 60, 1, 20, 1, 1, 1 seconds; lines every 10 s: a stall counts once, a validation and compiling never."""

    class Clock(pl.Callback):
        now = 0.0

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            self.now += (60.0, 1.0, 20.0, 1.0, 1.0, 1.0)[pl_module.completed_steps - 1]

        def on_validation_batch_start(self, *_: Any) -> None:
            self.now += 500.0

    clock = Clock()
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    fit(TinyModule(config), [clock, ProgressLine(line_seconds=10.0)])
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    speeds = {words[0]: words[2] for words in lines if len(words) > 2 and words[2].endswith("tokens/s")}
    step_tokens = 8
    assert speeds["step 3/6"] == f"{2 * step_tokens / 21:,.0f} tokens/s"
    assert speeds["step 6/6"] == f"{3 * step_tokens / 3:,.0f} tokens/s"


def test_the_loss_of_the_only_source_is_not_shown_twice(config, capsys, tmp_path, monkeypatch):
    records = [{"step": 1, "loss": 3.0}, {"step": 1, "val_loss": 2.0, "val_loss/code": 2.0}]
    labels = []
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda _, *points, label=None, **__: labels.append(label))
    monkeypatch.setattr("matplotlib.axes.Axes.legend", lambda *_: None)
    draw_losses(records, tmp_path / "one.png", "one")
    assert [label for label in labels if label] == ["training, running mean", "val_loss"]
    labels.clear()
    draw_losses([records[0], records[1] | {"val_loss/prose": 2.5}], tmp_path / "two.png", "two")
    assert labels[-3:] == ["val_loss", "val_loss/code", "val_loss/prose"]
    line = ProgressLine()
    line._console = new_console()
    several = {"val_loss/a": 1.0, "val_loss/b": 3.0}
    for sources, shown in (({"val_loss/code": 2.0}, "2.0000"), (several, "2.0000 (a 1.0000, b 3.0000)")):
        module = SimpleNamespace(validation_record={"step": 1, "val_loss": 2.0, **sources})
        line.on_validation_end(SimpleNamespace(sanity_checking=False), module)
        assert capsys.readouterr().out == f"step 1 | validation loss {shown}\n"


def test_a_job_is_called_by_what_it_differs_in(tmp_path):
    job = {"number": 0, "words": ["precision=mxfp8", "seed=1"]}
    (tmp_path / "sweep.json").write_text(json.dumps({"jobs": [job]}))
    assert title_of(tmp_path / "0") == f"{tmp_path.name}/0: precision=mxfp8 seed=1"
    assert title_of(tmp_path / "1") == "1"
    (tmp_path / "sweep.json").write_text("[")
    assert title_of(tmp_path / "0") == "0"
