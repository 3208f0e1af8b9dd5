"""Figures of routers by block, and the warning about experts without tokens."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_llm.base.errors import ConfigError
from lightning_llm.callbacks.router_health import RouterHealth
from lightning_llm.config.schema import ParallelConfig
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.degrees import Degrees
from lightning_llm.train.routing import FIGURES

TRAINER: Any = SimpleNamespace(
    is_global_zero=True, strategy=SimpleNamespace(layout=Layout(ParallelConfig(name="single"), Degrees()))
)


def step_of(health: RouterHealth, step: int, dead: int) -> dict[str, Any]:
    """Return the record of a step in which so many experts of block 3 had no token."""
    figures = {"layers.2": torch.zeros(len(FIGURES)), "layers.3": torch.tensor([4.0, 0, 0.5, 0.25, dead, 0.125])}
    routing = SimpleNamespace(blocks_in_all=2, by_block=figures)
    module: Any = SimpleNamespace(
        step_record={"step": step, "moe/dead": dead / 2}, train_step=SimpleNamespace(routing=routing)
    )
    health.on_train_batch_end(TRAINER, module)
    return module.step_record


def test_figures_of_blocks_are_recorded_every_few_steps():
    health = RouterHealth(every_steps=2)
    assert step_of(health, 1, 0).keys() == {"step", "moe/dead"}
    record = step_of(health, 2, 0)
    assert record["moe/load_max/layers.3"] == 4.0
    assert record["moe/bias_range/layers.3"] == 0.125
    assert len(record) == 2 + 2 * len(FIGURES)


def test_experts_that_stay_without_tokens_are_named_once(caplog):
    caplog.set_level(logging.WARNING, "lightning_llm.callbacks.router_health")
    health = RouterHealth(every_steps=1000, dead_steps=3)
    dead = [1, 1, 0, 2, 2, 2, 2, 0, 1, 1, 1]
    events = [step_of(health, step, count).get("event_blocks") for step, count in enumerate(dead, 1)]
    assert events == [None] * 5 + [{"layers.3": 2}] + [None] * 4 + [{"layers.3": 1}]
    assert [record.getMessage().partition(". ")[0] for record in caplog.records] == [
        "step 6: experts without a token for 3 steps: 2 of layers.3",
        "step 11: experts without a token for 3 steps: 1 of layers.3",
    ]


def test_an_event_of_the_loss_takes_precedence():
    health = RouterHealth(dead_steps=1)
    figures = {"layers.0": torch.ones(len(FIGURES))}
    module: Any = SimpleNamespace(
        step_record={"step": 1, "moe/dead": 1.0, "event": "spike", "event_action": "skip"},
        train_step=SimpleNamespace(routing=SimpleNamespace(blocks_in_all=1, by_block=figures)),
    )
    health.on_train_batch_end(TRAINER, module)
    assert (module.step_record["event"], module.step_record["event_action"]) == ("spike", "skip")
    assert module.step_record["event/dead_experts"] == 1


def test_arguments_below_one_are_rejected():
    with pytest.raises(ConfigError, match=r"dead_steps.*at least 1"):
        RouterHealth(dead_steps=0)
