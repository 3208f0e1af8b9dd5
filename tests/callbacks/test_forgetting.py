"""Forgetting against hand computation, its alarm, over a stop, and in the run's files. 3 seconds."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from lightning_llm.callbacks.forgetting import Forgetting
from lightning_llm.config.schema import Config
from lightning_llm.tracking.final_figures import final_figures
from lightning_llm.tracking.mlflow.writer import points
from lightning_llm.train.run_folder import RunFolder
from tests.protocol_module import TinyModule, fit

LOSSES = {  # by step of a validation
    2: {"code": 3.0, "prose": 2.0},
    4: {"code": 2.5, "prose": 2.25},
    6: {"code": 2.25, "prose": 2.5},
    8: {"code": 2.0, "prose": 2.0625},
    10: {"code": 3.5, "prose": 2.375},
}


class Forgetful(TinyModule):
    def __init__(self, config: Config, offset: int = 0):
        super().__init__(config)
        self.offset = offset

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        step = self.completed_steps + self.offset
        self.validation_record |= {"step": step, **{f"val_loss/{k}": v for k, v in LOSSES.get(step, {}).items()}}


def run(config: Config, forgetting: Forgetting, max_steps: int, offset: int = 0) -> list[dict[str, Any]]:
    config = config.model_copy(
        update={
            "trainer": config.trainer.model_copy(update={"max_steps": max_steps, "validate_every_steps": 2}),
            "run": config.run.model_copy(update={"dir": f"{config.run.dir}-{offset}"}),
        }
    )
    folder = RunFolder(Path(config.run.dir))
    trainer = fit(Forgetful(config, offset), [forgetting, folder])
    lines = [json.loads(line) for line in (folder.run_dir / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in lines if "val_loss" in record]
    assert trainer.callback_metrics["forgetting/prose"].item() == records[-1]["forgetting/prose"]
    return records


def test_the_rise_of_each_source_its_alarms_and_what_a_stop_keeps(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lightning_llm.callbacks.forgetting")
    first = Forgetting(alarm_above=0.25)
    records = run(config, first, 6)
    assert [(r["forgetting/code"], r["forgetting/prose"]) for r in records] == [(0, 0), (-0.5, 0.25), (-0.75, 0.5)]
    assert [r.get("event") for r in records] == [None, None, "forgetting"]  # at the threshold is not above it
    assert (records[-1]["event_action"], records[-1]["event_sources"]) == ("log", ["prose"])
    (line,) = caplog.messages
    assert line.startswith("step 6: forgetting:")
    assert "above step 2's by more than callbacks.forgetting.alarm_above=0.25: prose by 0.5000 to 2.5000" in line
    summary = json.loads(Path(f"{config.run.dir}-0", "summary.json").read_text())
    assert (summary["forgetting/code"], summary["forgetting/prose"]) == (-0.75, 0.5)
    assert summary["event/forgetting"] == 1

    resumed = Forgetting(alarm_above=0.25)  # a threshold that is changed on resume would be the new one
    resumed.load_state_dict(first.state_dict())
    records = run(config, resumed, 4, offset=6)
    assert [(r["forgetting/code"], r["forgetting/prose"]) for r in records] == [(-1.0, 0.0625), (0.5, 0.375)]
    assert [r.get("event_sources") for r in records] == [
        None,
        ["code", "prose"],
    ]  # below the limit in between: reported again
    assert len(caplog.messages) == 2
    assert {key: value for key, value, *_ in points(records[-1])} == {
        "val_loss": records[-1]["val_loss"], "val_loss/code": 3.5, "val_loss/prose": 2.375,
        "forgetting/code": 0.5, "forgetting/prose": 0.375, "tokens": records[-1]["tokens"],
    }  # fmt: skip
    assert final_figures(records)["forgetting/code"] == 0.5


def test_a_source_above_the_limit_is_reported_once_and_nan_is_above(config: Config) -> None:
    forgetting = Forgetting(alarm_above=0.1)
    assert forgetting.state_dict() == {}
    records = run(config, forgetting, 6)
    assert [r.get("event_sources") for r in records] == [None, ["prose"], None]
    forgetting._start["code"] = float("nan")
    assert "code" in run(config, forgetting, 2, offset=6)[0]["event_sources"]
