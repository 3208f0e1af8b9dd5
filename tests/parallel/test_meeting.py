"""Ranks that come late or never: named after some seconds, waited for in slices, and not confused with earlier ones."""

import threading

import pytest
import torch.distributed as dist

from lightning_llm.base.errors import ConfigError
from lightning_llm.parallel import process_group as meeting
from lightning_llm.parallel.process_group import Wait, meet, open_store

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29633"}


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


class Clock:
    """A clock that `sleep` alone moves, past seconds at which something `happens`."""

    def __init__(self, happens=None):
        self.seconds, self.happens = 0.0, happens or {}

    def sleep(self, seconds):
        self.seconds += seconds
        for each in [each for each in self.happens if each <= self.seconds]:
            self.happens.pop(each)()

    def wait(self, timeout):
        return Wait(timeout, lambda: self.seconds, self.sleep)


def arrive(store, rank):
    store.set(f"{store.get('meeting').decode()}/{rank}", "")


def test_ranks_that_are_away_are_named_once_and_waited_for(monkeypatch, capsys):
    store, told = dist.HashStore(), []
    store.set("meeting", "of-an-earlier-start")
    arrive(store, 1)  # which does not count

    def some_arrive():
        told.append(capsys.readouterr().err)
        arrive(store, 1)
        arrive(store, 3)

    clock = Clock({30: some_arrive, 40: lambda: arrive(store, 2)})
    monkeypatch.setattr(meeting, "Wait", clock.wait)
    meet(store, 0, 4, 600)
    assert told[0].startswith("note   waiting for 3 of 4 ranks at 127.0.0.1:29633 (from torchrun's variables RANK=0")
    assert "WORLD_SIZE=4" in told[0]
    assert ": 1, 2, 3. Start the missing ranks" in told[0]
    assert capsys.readouterr().err == ""  # once
    assert clock.seconds == pytest.approx(40, abs=1)


def test_missing_ranks_are_named_in_the_error(monkeypatch):
    monkeypatch.setattr(meeting, "Wait", Clock().wait)
    with pytest.raises(
        ConfigError, match=r"WORLD_SIZE: timed out after 50 s .* waiting for 3 of 4 ranks at .*:29633 .*: 1, 2, 3"
    ):
        meet(dist.HashStore(), 0, 4, 50)
    monkeypatch.setattr(meeting, "_listens", lambda host, port: False)
    with pytest.raises(ConfigError, match=r"for rank 0 to open 127\.0\.0\.1:29633"):
        open_store(2, 50)


def test_a_wait_ends_by_a_signal_between_two_looks():
    def interrupted(seconds):
        assert seconds <= 0.25
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Wait(1800, lambda: 0.0, interrupted).until(lambda: False, lambda: "nobody")


def test_all_ranks_meet_and_a_later_rank_0_begins_anew():
    """The store is of an agent that outlives its ranks: a new start must not count those of the last."""
    store, ended = dist.HashStore(), []

    def come(rank):
        meet(store, rank, 4, 60)
        ended.append(rank)

    for start in (1, 2):
        ranks = [threading.Thread(target=come, args=(rank,)) for rank in (1, 2, 0, 3)]
        for each in ranks[:3]:
            each.start()
        ranks[0].join(0.3)
        assert len(ended) == 4 * (start - 1)  # the last is away still
        ranks[3].start()
        for each in ranks:
            each.join()
    assert sorted(ended) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(("name", "value"), [("MASTER_PORT", ""), ("MASTER_PORT", "70000"), ("MASTER_ADDR", "")])
def test_a_missing_address_is_rejected_by_name(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{name}='{value}': must be"):
        open_store(0, 5)
