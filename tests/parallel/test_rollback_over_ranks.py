"""Two sharding ranks roll back together in their processes, and match one rank with `data.skip_samples`. 4 seconds."""

import json
import threading
from pathlib import Path
from unittest.mock import patch

from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.data.corpus import Corpus
from lightning_llm.plan.resolve import plan_of
from lightning_llm.run.opening import open_rank
from lightning_llm.run.rank import decide_with_ranks, train_with_rollbacks
from tests.planted import corrupted_samples
from tests.run_metrics import curve

WORDS = [
    "trainer.max_steps=44", "schedule.total_steps=44", "trainer.validate_every_steps=null",
    "data.validation.fraction=0", "checkpoint.every_steps=15", "checkpoint.keep_last=10",
    "optim.learning_rate=1e-2", "schedule.warmup_steps=5", "spikes.policy=rollback", "precision=fp8_delayed",
    "precision.casts=eager", "model.hidden_size=64", "data.sequence_length=32",
]  # fmt: skip


def trained(config: Config) -> list[int]:
    locks: list = []
    with patch.object(Corpus, "micro_batches", corrupted_samples(156, 159)):
        rank = open_rank(plan_of(config))
        train_with_rollbacks(rank, decide_with_ranks(rank.plan.config, locks))
    for each in locks:
        each.release()
    assert "rank heartbeat" not in [each.name for each in threading.enumerate()]
    return json.loads(Path(config.run.dir, "summary.json").read_text()).get("rollbacks", [])


def test_ranks_go_back_together(ranks, small_run, tmp_path):
    told = compose_config(small_run(tmp_path / "told", *WORDS, "data.skip_samples=[[152,159]]"))
    config = compose_config(small_run(tmp_path / "back", *WORDS, "parallel=zero3", "trainer.devices=2"))
    assert ranks(1).call(trained, told) == []
    (made,) = ranks(2).call(trained, config)
    assert (made["step"], made["skipped"]) == (40, [152, 159])
    assert not Path(config.run.dir, "ranks").exists()
    assert curve(Path(config.run.dir)) == curve(Path(told.run.dir))
