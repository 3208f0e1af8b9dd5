"""Properties of all callbacks of `conf/callbacks/default.yaml` together: they change nothing and cost next to
nothing."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from hydra.utils import instantiate

import lightning_llm.conf
from lightning_llm.config.schema import Config
from lightning_llm.tracking.mlflow.tracker import MLflowTracker
from lightning_llm.train.run_folder import RunFolder
from tests.protocol_module import TinyModule, fit, make_config

CONF = Path(lightning_llm.conf.__file__).parent
DEFAULT = yaml.safe_load((CONF / "callbacks/default.yaml").read_text())


def silent_tracker(config: Config) -> MLflowTracker:
    tracker = MLflowTracker(config, Path(config.run.dir), close_seconds=0)
    tracker.command = ["sleep", "600"]
    return tracker


@pytest.fixture
def observers(config: Config) -> dict[str, list[pl.Callback]]:
    made: dict[str, list[pl.Callback]] = {name: [instantiate(node)] for name, node in DEFAULT.items()}
    made["run_folder"] = [RunFolder(Path(config.run.dir))]
    made["tracked"] = [RunFolder(Path(config.run.dir), [silent_tracker(config)])]
    made["all"] = [*(instantiate(node) for node in DEFAULT.values()), *made["tracked"]]
    return made


@pytest.mark.parametrize("name", [*DEFAULT, "run_folder", "tracked", "all"])
def test_losses_and_weights_have_the_same_bits(
    name: str, config: Config, observers: dict[str, list[pl.Callback]]
) -> None:
    Path(config.run.dir).mkdir(parents=True)
    bare = TinyModule(config)  # seeds torch for dropout
    fit(bare, [])
    random_state = torch.get_rng_state()
    observed = TinyModule(config)
    fit(observed, observers[name])
    assert observed.true_losses == bare.true_losses
    assert len(set(bare.true_losses)) == 6
    assert torch.equal(torch.get_rng_state(), random_state)
    for one, other in zip(bare.parameters(), observed.parameters(), strict=True):
        assert torch.equal(one, other)


class Meter(pl.Callback):
    """Sums this thread's processor time between its twin before all other callbacks and itself after them."""

    def __init__(self, first: "Meter | None" = None):
        self.first = first
        self.at = 0.0
        self.seconds: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.at = time.thread_time()
        if self.first:
            self.seconds.append(self.at - self.first.at)


def test_all_callbacks_together_cost_little_per_step(
    tmp_path: Path, observers: dict[str, list[pl.Callback]], capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path / "long", max_steps=600, trainer={"validate_every_steps": 600})
    before = Meter()
    after = Meter(before)
    fit(TinyModule(config), [before, *observers["all"], after])
    mean = sum(after.seconds[100:]) / len(after.seconds[100:])
    with capsys.disabled():
        print(f" [{mean * 1e3:.3f} ms per step]", end="")
    assert mean < 0.3e-3


def test_the_config_files_fit_the_schema(tmp_path: Path) -> None:
    for name in ("default", "none"):
        make_config(tmp_path, callbacks=yaml.safe_load((CONF / f"callbacks/{name}.yaml").read_text()))
    for name in ("mlflow", "csv", "tensorboard", "wandb", "none"):
        logger = yaml.safe_load((CONF / f"logger/{name}.yaml").read_text())
        assert make_config(tmp_path, logger=logger).logger.name == name
