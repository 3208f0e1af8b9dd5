"""Sums within machines first and then between them: same bits as one rank, and only one tensor leaves a machine."""

from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_llm.config.schema import Config
from lightning_llm.plan.memory.units import units_of
from lightning_llm.plan.resolve import plan_of
from lightning_llm.plan.traffic import bytes_sent, traffic_bytes
from tests.parallel.layout_matrix import lasting
from tests.parallel.test_bytes import Measure
from tests.parallel.traced_run import Trace, difference, traced_run

Sent = Counter[tuple[str, tuple[int, ...]]]


class ThirdStep(Measure):
    """Measures the third step: gradients of those before it are gathered for the trace."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx - 1)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx - 1)


def traced_and_counted(config: Config) -> tuple[Trace, Sent]:
    """Return (results that must not depend on the layout, bytes sent by rank 0 in the third step)."""
    measure = ThirdStep()
    trace = traced_run(config, measure, saves=False)
    return trace, measure.sent.counted.bytes


def between(sent: Sent, per_node: int, *kinds: str) -> int:
    """Return the bytes that rank 0 sends to other machines, around a ring or in equal parts to all other ranks."""
    total = 0.0
    for (kind, ranks), size in sent.items():
        nodes = [rank // per_node for rank in ranks]
        if kind in kinds and len(set(nodes)) > 1:
            away = sum(node > 0 for node in nodes)
            total += size * (away / (len(ranks) - 1) if kind == "all_to_all" else len(set(nodes)) / len(ranks))
    return int(total)


RANKS, PER_NODE, TURNS = 4, 2, 2
CASES = [
    ("zero3", TURNS),
    pytest.param("zero1", 1, marks=pytest.mark.full),
    ("ddp", 1),
]
"""Layouts on two machines of two ranks, and how often in a step they scatter all gradients."""


@pytest.mark.parametrize(("layout", "times"), CASES)
def test_machines_of_two_train_to_the_bits_of_one_rank_and_send_a_sum_each(layout, times, ranks, matrix_run, alone):
    words = ["model.num_layers=2", "model.vocab_size=384", *lasting(3)]
    machines = [f"world={RANKS}", f"trainer.devices={PER_NODE}", "parallel.reduction=tree"]
    config = matrix_run(layout, RANKS, TURNS * RANKS, "bf16", *words, *machines)
    trace, sent = ranks(RANKS).call(traced_and_counted, config)
    assert difference(trace, alone(TURNS * RANKS, "bf16", *words)) is None

    plan = plan_of(config)
    by_kind: Counter[str] = Counter()
    for (kind, _), size in sent.items():
        by_kind[kind] += size
    assert dict(by_kind) == {kind: size for kind, size in bytes_sent(plan).items() if size}
    nodes = RANKS // PER_NODE
    whole = 4 * sum(unit.whole(RANKS) for unit in units_of(config.model).each())
    assert PER_NODE * between(sent, PER_NODE, "all_to_all") == times * whole * (nodes - 1) // nodes
    assert traffic_bytes(plan)["between_nodes"] == between(sent, PER_NODE, "all_to_all", "all_gather")
