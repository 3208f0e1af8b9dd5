"""A few faults of `make chaos`, and the campaign's own judgement."""

import shutil
from dataclasses import replace

import pytest

from tests.chaos.campaign import Campaign, table
from tests.chaos.faults_at_random import KINDS, Fault
from tests.run_metrics import read_metrics


@pytest.fixture(scope="module")
def campaign(tmp_path_factory, small_run, empty_store):
    return Campaign(tmp_path_factory.mktemp("chaos"), small_run, empty_store, seed=1)


def planted(monkeypatch, kind: str, **more: object) -> None:
    """Make the next fault one of `kind`, by default late in a run of two ranks."""
    late = {"layout": "zero3", "recipe": "fp8_delayed", "step": 8, "seconds": 0.0, "restarts": 0}
    monkeypatch.setattr(Fault, "drawn", lambda *_: Fault(kind=kind, place=0.7, **{**late, **more}))


@pytest.mark.parametrize(
    "kind", ["damage", pytest.param("no disk space", marks=pytest.mark.full)]
)  # test_storage_faults
def test_a_run_survives_random_faults_with_identical_results(kind, campaign, monkeypatch, tmp_path):
    planted(monkeypatch, kind)
    (outcome,) = campaign.outcomes([KINDS.index(kind)])
    assert outcome.problem == ""
    assert outcome.befell
    assert len(outcome.codes) == 2
    assert f"| {kind} | 1 | 1 | 2.0 | 1 |" in table([outcome])


@pytest.mark.full
def test_the_campaign_detects_a_run_with_other_results(campaign, monkeypatch):
    """By another learning rate in the run that is disturbed."""
    planted(monkeypatch, "SIGTERM", layout="single")
    words = Fault.words
    monkeypatch.setattr(Fault, "words", lambda self: [*words(self), "optim.learning_rate=2e-3"])
    monkeypatch.setattr(
        campaign, "_reference", lambda fault: Campaign._reference(campaign, replace(fault, recipe="fp32"))
    )
    (outcome,) = campaign.outcomes([90])
    assert outcome.problem == "metrics.jsonl is not the undisturbed run's"
    assert read_metrics(campaign.folder / "90" / "run")[-1]["step"] == 12
    shutil.rmtree(campaign.folder / "90")


def test_faults_are_functions_of_seed_and_number():
    drawn = [Fault.drawn(1, number) for number in range(100)]
    assert drawn == [Fault.drawn(1, number) for number in range(100)]
    assert {each.kind for each in drawn} == set(KINDS)
    assert drawn[3] != Fault.drawn(2, 3)


@pytest.mark.full
def test_a_campaign_of_another_seed(campaign):
    outcomes = list(campaign.outcomes(range(100, 124)))
    assert [(each.number, each.problem) for each in outcomes if each.problem] == []
