"""A batch skipped, or stopped before, on several ranks: all decide the same, to the bits of one rank. 12 seconds."""

from pathlib import Path

import pytest

from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.data.corpus import Corpus
from lightning_llm.train.checkpoint.verification import newest_verified
from lightning_llm.train.spikes import SpikeStop
from tests.parallel.traced_run import Trace, difference, traced_run
from tests.planted import corrupted
from tests.run_metrics import read_metrics

BAD = 36


def skipping_run(config: Config) -> Trace:
    """Train over a batch that is corrupted in the second micro-batch, which one rank of two computes."""
    whole = Corpus.micro_batches
    Corpus.micro_batches = corrupted(BAD, micro_batch=1)
    try:
        return traced_run(config)
    finally:
        Corpus.micro_batches = whole


def stopping_run(config: Config) -> tuple[str, int]:
    """Train until the corrupted batch ends the run; return (the error, step of the saved state)."""
    try:
        skipping_run(config)
    except SpikeStop as stop:
        checkpoint, _ = newest_verified(Path(config.run.dir, "checkpoints"))
        return str(stop), checkpoint.step if checkpoint else 0
    raise AssertionError("the run was not stopped")


@pytest.fixture(scope="module")
def config(small_run, tmp_path_factory):
    def compose(layout: str, world: int, policy: str = "skip") -> Config:
        words = small_run(
            tmp_path_factory.mktemp("run"), f"parallel={layout}", f"trainer.devices={world}", f"spikes.policy={policy}",
            f"trainer.max_steps={BAD + 3}", "trainer.validate_every_steps=null", "data.validation.fraction=0",
            "checkpoint.every_steps=null", "optim.learning_rate=1e-2",
            "+callbacks.spikes._target_=lightning_llm.callbacks.spikes.Spikes",
        )  # fmt: skip
        return compose_config(words)

    return compose


def skipped_in(config: Config) -> list[bool]:
    records = read_metrics(Path(config.run.dir))
    assert [each["event_worst_micro_batch"] for each in records if "event" in each] == [1]
    return [each.get("skipped", False) for each in records]


def test_all_ranks_leave_the_same_update_out(ranks, config):
    alone = config("single", 1)
    reference = ranks(1).call(skipping_run, alone)
    assert sum(skipped_in(alone)) == 1
    ours = config("zero2", 2)
    assert difference(ranks(2).call(skipping_run, ours), reference) is None
    assert skipped_in(ours) == skipped_in(alone)


@pytest.mark.full
def test_all_ranks_stop_before_the_same_update(ranks, config):
    said, saved = ranks(2).call(stopping_run, config("zero3", 2, "stop"))
    assert said.startswith(f"step {BAD} is out of the ordinary")
    assert saved == BAD - 1
