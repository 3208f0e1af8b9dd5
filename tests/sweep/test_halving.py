"""Searches by halving over jobs with known losses: stopped recipes, continued ones, and those left to judge."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from lightning_llm.__main__ import main
from lightning_llm.config.schema.sweep import SweepConfig
from lightning_llm.sweep import running_jobs as watch
from lightning_llm.sweep.running_jobs import worse_than_best
from tests.sweep.made_jobs import make_jobs
from tests.sweep.searched_jobs import recipe_loss, trials_of, words


@pytest.fixture(autouse=True)
def often_looked_at(undrawn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SECONDS", 0.05)


def test_halving_ends_what_is_clearly_worse_and_nothing_by_rank_alone(tmp_path, monkeypatch, capsys):
    kind = make_jobs(monkeypatch, recipe_loss)

    def waits(config: dict[str, Any]) -> int | None:
        """Each waits to be stopped: in its first start at the first rung, in its second at the second."""
        starts = sum(each["run"]["dir"] == config["run"]["dir"] for each in kind.started)
        return (10, 20, None)[starts - 1]

    kind.pauses = staticmethod(waits)
    asked = words(tmp_path, "sweep.search=halving", "precision=fp32,bf16,fp8_current,fp8_delayed", "seed=0,1,2")
    assert main(["plan", *asked]) == 0
    assert (
        "halving of 4 recipes: those worse than the best by more than 0.01 end at steps 10, 20"
        in capsys.readouterr().out
    )
    assert main(["train", *asked]) == 0
    told = capsys.readouterr().out
    assert "ended  precision=fp8_current" in told
    assert told.count("paused at rung 1 of 2, step 10, after") == 12
    assert "exit code" not in told
    assert "left of the search" in told
    states = {each["recipe"]: each["state"] for each in trials_of(tmp_path)}
    assert states == {
        "precision=fp32": "whole", "precision=bf16": "whole",
        "precision=fp8_current": "ended", "precision=fp8_delayed": "ended",
    }  # fmt: skip
    last = {each.parent.name: each.read_text().count("val_loss") for each in tmp_path.glob("default/*/*/metrics.jsonl")}
    assert sorted(last.values()) == [1] * 3 + [2] * 3 + [4] * 6  # validations: to the first rung, the second, the end
    assert main(["compare", "--json", str(tmp_path / "default" / "searched")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["verdicts"]] == ["fp32"]
    started = len(kind.started)
    assert main(["train", *asked]) == 0
    assert len(kind.started) == started


@pytest.mark.full
def test_seeds_can_be_added_to_the_remaining_recipes_of_a_halving(tmp_path, monkeypatch, capsys):
    """Neither the advice of `compare` nor a typed command restarts a stopped recipe."""
    kind = make_jobs(monkeypatch, recipe_loss)
    kind.pauses = staticmethod(lambda config: 10 if len(kind.started) <= 6 else None)
    asked = words(tmp_path, "sweep.search=halving", "precision=fp32,bf16,fp8_current", "seed=0,1")
    assert main(["train", *asked]) == 0
    folder, more = tmp_path / "default" / "searched", [*asked[:-1], "seed=0,1,2"]
    kind = make_jobs(monkeypatch, recipe_loss)
    capsys.readouterr()
    assert main(["plan", *more]) == 0
    told = capsys.readouterr().out
    assert "ended before" in told
    assert "9 (numbered from 0; local, 1 at once): 4 finished, 2 new, 3 ended" in told
    assert main(["train", *more]) == 0
    assert sorted((each["precision"]["name"], each["seed"]) for each in kind.started) == [("bf16", 2), ("fp32", 2)]
    told = capsys.readouterr().out
    assert "above precision=fp32 at step 10, in an earlier start: not resumed" in told
    assert "6 of 9 jobs finished, 3 stopped by the search" in told
    assert main(["compare", "--json", str(folder)]) == 0
    assert [row["pairs"] for row in json.loads(capsys.readouterr().out)["verdicts"]] == [3]
    (folder / "search.json").write_text('{"trials": [{"jobs": [4], "ended_at": {}}], "ended": {}}')
    assert main(["plan", *more]) == 2
    assert "search.json: cannot be read: " in capsys.readouterr().err


def test_dropped_jobs_do_not_count_as_left_in_a_stopped_halving(tmp_path, monkeypatch, capsys):
    kind = make_jobs(monkeypatch, recipe_loss)

    def waits(config: dict[str, Any]) -> int:
        """Each waits at the rung; the one that continues waits at the next validation, where a signal comes."""
        if sum(each["run"]["dir"] == config["run"]["dir"] for each in kind.started) == 1:
            return 10
        if (Path(config["run"]["dir"]) / "metrics.jsonl").read_text().count("val_loss") == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return 20

    kind.pauses = staticmethod(waits)
    asked = words(tmp_path, "sweep.search=halving", "sweep.rungs=[0.25]", "precision=fp32,fp8_current", "seed=0,1")
    assert main(["train", *asked]) == 128 + signal.SIGTERM
    told = capsys.readouterr()
    assert "0 of 4 jobs finished, 2 stopped by the search" in told.out
    assert "stopped in job 0, 1; 2 of 4 jobs are left; to resume: " in told.err
    kind.pauses = staticmethod(lambda config: None)
    assert main(["train", *asked]) == 0
    assert "2 of 4 jobs finished, 2 stopped by the search" in capsys.readouterr().out


@pytest.mark.full
def test_a_seed_of_an_ended_recipe_that_came_to_its_end_is_not_judged(tmp_path, monkeypatch, capsys):
    """As where a killed start left its job behind: it trains on, past the rung at which its recipe is ended."""
    kind = make_jobs(monkeypatch, recipe_loss)

    def waits(config: dict[str, Any]) -> int | None:
        starts = sum(each["run"]["dir"] == config["run"]["dir"] for each in kind.started)
        left_behind = config["precision"]["name"] == "fp8_current" and config["seed"] == 0
        return None if left_behind else (10, 20, None)[starts - 1]

    kind.pauses = staticmethod(waits)
    asked = words(tmp_path, "sweep.search=halving", "precision=bf16,fp32,fp8_current", "seed=0,1,2")
    assert main(["train", *asked]) == 0
    assert "7 of 9 jobs finished, 2 stopped by the search" in capsys.readouterr().out
    assert main(["compare", "--json", str(tmp_path / "default" / "searched")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["verdicts"]] == ["fp32"]
    assert any("left out: job 6, 7, 8 (precision=fp8_current" in note for note in found["notes"])


@pytest.mark.parametrize("spread", [(1, 1, 1, 1, 1), pytest.param((1, 1, 1, 3, 3), marks=pytest.mark.full)])
def test_halving_seldom_ends_a_recipe_that_is_as_good_as_the_best(spread):
    """Five recipes of one loss, over two rungs: each in half of 5 % at most; and one far off always."""
    rng, keys, trials = np.random.default_rng(0), SweepConfig(margin=1e-9), 250
    ended = np.zeros(5)
    for _ in range(trials):
        runs = rng.standard_normal((5, 6)) * np.array(spread)[:, None]
        gone = {place for rung in (runs[:, :3], runs[:, 3:]) for place in worse_than_best(rung, keys, 2)}
        ended[list(gone)] += 1
    assert (ended / trials <= np.where(np.array(spread) > 1, 0.06, 0.04)).all()  # of 250: known to 1 %
    far = np.vstack([np.zeros((4, 3)), np.full((1, 3), 9.0)]) + rng.standard_normal((5, 3)) * 0.1
    assert worse_than_best(far, keys, 2).keys() == {4}


def test_an_interval_of_a_rung_has_its_share_of_the_error_and_clears_the_margin():
    """By Student's t of the two recipes' differences: with one of them there is nothing else to hold together."""
    best, other = np.array([3.0, 3.1, 3.3, 3.2]), np.array([3.36, 3.43, 3.72, 3.52])
    differences = other - best
    middle, spread = differences.mean(), differences.std(ddof=1) / 2
    for rungs in (1, 2, 3):
        low = middle - stats.t.ppf(1 - 0.05 / rungs / 2, 3) * spread
        for margin, ends in ((low - 1e-6, True), (low + 1e-6, False)):
            found = worse_than_best(np.stack([other, best]), SweepConfig(margin=margin), rungs)
            assert found.keys() == ({0} if ends else set())
            assert [each[:3] for each in found.values()] == [(1, pytest.approx(middle), pytest.approx(low))] * ends


def test_a_recipe_that_diverged_at_all_seeds_is_dropped_unless_all_did():
    nothing, some = [np.nan] * 3, [np.nan, 3.0, 3.1]
    keys = SweepConfig(margin=0.01)
    assert worse_than_best(np.array([nothing, some, nothing]), keys, 2).keys() == {0, 2}
    assert worse_than_best(np.array([nothing, nothing]), keys, 2) == {}
