"""Searches by Optuna over jobs with known best values: found, resumed, pruned, and compared."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.sweep import running_jobs as watch
from lightning_llm.sweep.optuna_study import corners_of, distributions_of, overrides_of
from lightning_llm.sweep.running_jobs import pruned_at
from tests.sweep.made_jobs import Killed, killed_after, make_jobs
from tests.sweep.searched_jobs import recipe_loss, trials_of, words

BEST_RATE = 3e-3
LR = "optim.learning_rate=tag(log,interval(1e-4,1e-1))"


def loss(config: dict[str, Any], step: int) -> float:
    """A curve that is best at `BEST_RATE`, by the square of the decades away from it, and an effect of the seed."""
    away = math.log10(config["optim"]["learning_rate"] / BEST_RATE)
    return 4 - step / 40 + 0.2 * config["seed"] + 0.3 * away**2 * step / 40


def optuna_words(folder: Path, *more: str) -> list[str]:
    return words(folder, "sweep.search=optuna", "optim.learning_rate=1e-2", LR, *more)


@pytest.fixture(autouse=True)
def often_looked_at(undrawn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SECONDS", 0.05)


def test_optuna_finds_the_best_rate_and_compare_reads_its_jobs(tmp_path, monkeypatch, capsys):
    make_jobs(monkeypatch, loss)
    asked = optuna_words(tmp_path, "sweep.trials=10", "sweep.pruning=none")
    assert main(["plan", *asked]) == 0
    told = capsys.readouterr().out
    assert "optuna, 10 trials (0 done), tpe, no pruning: 1 job of the baseline, at most 10 of trials" in told
    assert "1 job before the first trial, at most " in told
    assert "tag(log,interval(1e-4,1e-1))" in told
    assert main(["train", *asked]) == 0
    trials = trials_of(tmp_path)
    assert [each["state"] for each in trials] == ["complete"] * 10
    best = min(trials, key=lambda each: each["gap"])
    assert abs(math.log10(best["values"]["optim.learning_rate"] / BEST_RATE)) < 0.2
    rate = best["values"]["optim.learning_rate"]
    at_end = 0.3 * (math.log10(rate / BEST_RATE) ** 2 - math.log10(1e-2 / BEST_RATE) ** 2)
    assert best["gap"] == pytest.approx(at_end)  # of the last validation, to the baseline's run of the seed
    capsys.readouterr()
    assert main(["compare", "--json", str(tmp_path / "default" / "searched")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["baseline"] == "learning_rate=0.01"
    assert {round(row["gap"], 9) for row in found["verdicts"]} == {round(each["gap"], 9) for each in trials}


def test_a_killed_search_continues_unchanged(tmp_path, monkeypatch):
    make_jobs(monkeypatch, loss)
    assert main(["train", *optuna_words(tmp_path / "whole", "sweep.trials=3")]) == 0
    ran = 0
    for limit in (0, 2):  # jobs before it dies: in the baseline's, in a trial's
        kind = killed_after(make_jobs(monkeypatch, loss), limit)
        with pytest.raises(Killed):
            main(["train", *optuna_words(tmp_path / "killed", "sweep.trials=3")])
        ran += len(kind.ended)
    kind = make_jobs(monkeypatch, loss)
    with monkeypatch.context() as patch:  # as the values of the last trial are drawn
        patch.setattr("optuna.trial.Trial._suggest", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            main(["train", *optuna_words(tmp_path / "killed", "sweep.trials=3")])
    assert main(["train", *optuna_words(tmp_path / "killed", "sweep.trials=3")]) == 0
    assert trials_of(tmp_path / "killed") == trials_of(tmp_path / "whole")
    assert ran + len(kind.ended) == 4
    (tmp_path / "killed" / "default" / "searched" / "search.json").unlink()  # killed before it was written
    assert main(["train", *optuna_words(tmp_path / "killed", "sweep.trials=3")]) == 0
    assert trials_of(tmp_path / "killed") == trials_of(tmp_path / "whole")
    kind = make_jobs(monkeypatch, loss)  # and further, where more trials are asked for
    assert main(["train", *optuna_words(tmp_path / "killed", "sweep.trials=4")]) == 0
    assert (len(kind.ended), len(trials_of(tmp_path / "killed"))) == (1, 4)


@pytest.mark.full
def test_a_pruned_trial_is_left_out_of_the_verdict(tmp_path, monkeypatch, capsys):
    """Each trial waits at the second validation of four to be stopped, but those that have to be whole."""
    kind = make_jobs(monkeypatch, loss)
    waits = lambda config: 20 if len(kind.started) > 4 and loss(config, 40) > 3.2 else None  # noqa: E731
    kind.pauses = staticmethod(waits)
    assert (
        main(["train", *optuna_words(tmp_path, "sweep.trials=7", "sweep.startup_trials=3", "sweep.sampler=random")])
        == 0
    )
    trials = trials_of(tmp_path)
    pruned = [each for each in trials if each["state"] == "pruned"]
    assert pruned
    assert all(each["trial"] >= 3 for each in pruned)
    assert [each["ended_at"] for each in pruned] == [{"step": 10, "gap": each["gap"]} for each in pruned]
    assert not any(each["ended_at"] for each in trials if each["state"] == "complete")
    whole = [each["gap"] for each in trials if each["state"] == "complete"]
    assert all(each["gap"] > np.median(whole) / 2 for each in pruned)  # half of the way
    told = capsys.readouterr().out
    assert "pruned at step" in told
    assert f"{len(pruned)} stopped by the search" in told
    assert told.count(": pruned after") == len(pruned)
    assert "exit code" not in told
    assert main(["compare", "--json", str(tmp_path / "default" / "searched")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["verdicts"]) == len(whole)
    assert any("Stopped by the search and left out" in note for note in found["notes"])
    started = len(kind.started)
    assert (
        main(["train", *optuna_words(tmp_path, "sweep.trials=7", "sweep.startup_trials=3", "sweep.sampler=random")])
        == 0
    )
    assert len(kind.started) == started  # pruned trials stay pruned


@pytest.mark.full
def test_a_trial_that_made_its_last_step_before_the_signal_came_is_whole(tmp_path, monkeypatch, capsys):
    kind = make_jobs(monkeypatch, loss)
    kind.pauses = staticmethod(lambda config: 40 if len(kind.started) > 3 and loss(config, 40) > 3.2 else None)
    asked = optuna_words(tmp_path, "sweep.trials=5", "sweep.startup_trials=2", "sweep.sampler=random")
    assert main(["train", *asked]) == 0
    assert any(job.signalled.is_set() for job in kind.made)
    trials, told = trials_of(tmp_path), capsys.readouterr().out
    assert [each["state"] for each in trials] == ["complete"] * 5
    assert f"best   trial {min(trials, key=lambda each: each['gap'])['trial']}: " in told
    assert ("pruned at step" in told, "6 of 6 jobs finished, in " in told) == (False, True)
    assert main(["compare", "--json", str(tmp_path / "default" / "searched")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {round(row["gap"], 9) for row in found["verdicts"]} == {round(each["gap"], 9) for each in trials}


@pytest.mark.full
def test_a_finished_seed_of_a_trial_that_was_pruned_is_left_out_of_the_verdict(tmp_path, monkeypatch, capsys):
    """It was ended after its first seed, which was whole before it was looked at."""
    make_jobs(monkeypatch, loss)
    asked = optuna_words(tmp_path, "sweep.trials=5", "sweep.startup_trials=2", "sweep.sampler=random", "seed=0,1")
    assert main(["train", *asked]) == 0
    trials = trials_of(tmp_path)
    pruned = [each for each in trials if each["state"] == "pruned"]
    assert pruned
    assert all(each["ended_at"]["step"] == 10 for each in pruned)
    capsys.readouterr()
    assert main(["compare", "--json", str(tmp_path / "default" / "searched")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["verdicts"]) == len(trials) - len(pruned)
    (note,) = (note for note in found["notes"] if "Stopped by the search and left out" in note)
    assert all(f"trial {each['trial']}, pruned at step 10" in note for each in pruned)


def test_the_median_rule():
    others = [{10: 0.0, 20: 0.1}, {10: 0.2, 20: 0.3}, {10: 0.4, 20: 0.5}]
    assert pruned_at({10: 0.21, 20: 0.0}, others, 10, 3) == (10, 0.21)
    assert pruned_at({10: 0.21, 20: 0.2}, others, 11, 3) is None  # too early, and then better
    assert pruned_at({10: 0.21}, others, 10, 4) is None  # too few to know
    assert pruned_at({10: 0.2, 20: math.inf}, others, 10, 3) == (20, math.inf)


def space_of(*given: str) -> dict[str, Any]:
    return {each.key_or_group: each for each in map(OverridesParser.create().parse_override, given)}


def test_hydras_sweep_syntax_is_the_space():
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    space = space_of("a=tag(log,interval(1e-4,1e-2))", "b=int(interval(1,8))", "c=range(2,9,3)", "d=x,y", "seed=0,1")
    found = distributions_of(space)
    assert found == {
        "a": FloatDistribution(1e-4, 1e-2, log=True), "b": IntDistribution(1, 8), "c": IntDistribution(2, 8, step=3),
        "d": CategoricalDistribution(["x", "y"]),
    }  # fmt: skip
    assert overrides_of({"a": 1e-4, "b": 3, "d": "x"}) == ["a=0.0001", "b=3", "d=x"]
    assert len(corners_of(found)) == 8
    assert distributions_of(space_of("c=shuffle(range(0,1000000000000))")) == {"c": IntDistribution(0, 10**12 - 1)}
    with pytest.raises(ConfigError, match=r"c: cannot be searched: it has more than 10,000 values, so use an interval"):
        distributions_of(space_of("c=shuffle(range(0,1,1e-12))"))
    with pytest.raises(ConfigError, match=r"the interval from 2\.0 to 1\.0 is empty"):
        distributions_of(space_of("a=interval(2,1)"))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([LR, "launcher=slurm"], "launcher"),
        (["seed=0,1"], "sweep.search: has nothing to search"),
        (["optim.learning_rate=interval(-1,1)"], "optim.learning_rate=-1.0"),
        ([LR, "sweep.trials=0"], "sweep.trials=0"),
        (
            [LR, "sweep.rungs=[0.3]"],
            "sweep.rungs: is only read with sweep.search=halving, and this sweep has sweep.search=optuna",
        ),
        ([LR, "sweep.baseline=seed=0"], "sweep.baseline: is only read with sweep.until=decided, and this"),
        ([LR, "sweep.trials=4", "sweep.startup_trials=4"], "sweep.startup_trials=4: must be below sweep.trials=4"),
        (
            ["sweep.search=halving", "sweep.trials=4", "seed=0,1"],
            "sweep.trials: is only read with sweep.search=optuna, and this",
        ),
        (["sweep.search=null", "sweep.margin=0.02", "seed=0,1"], "and this sweep has neither looks nor a search"),
        (["optim.learning_rate=tag(lin,interval(1e-4,1e-3))"], "the only tag is log, not lin"),
        (["optim.learning_rate=tag(log,interval(0,1))"], "a logarithmic interval must begin above 0"),
        (["launcher.at_once=choice(1,2)"], "launcher.at_once: cannot be searched: it does not change training"),
        (["trainer.max_steps=choice(20,40)"], "trainer.max_steps: cannot be searched: trials are compared"),
        (["sweep.search=halving", "sweep.rungs=[]", "seed=0,1"], "sweep.rungs: must have at least 1 item"),
        (
            ["sweep.search=halving", "sweep.rungs=0.5", "seed=0,1"],
            "sweep.rungs=0.5: must be a list: sweep.rungs=[0.5]",
        ),
        (
            ["sweep.search=halving", "trainer.validate_every_steps=10,20", "seed=0,1"],
            "trainer.validate_every_steps: must be the same for all recipes",
        ),
    ],
)
def test_an_invalid_search_is_refused_before_anything_starts(more, said, tmp_path, capsys):
    assert main(["train", *words(tmp_path, "sweep.search=optuna", *more)]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_another_search_does_not_go_on_in_the_folder_of_one(tmp_path, monkeypatch, capsys):
    kind = make_jobs(monkeypatch, loss)
    assert main(["train", *optuna_words(tmp_path, "sweep.trials=1")]) == 0
    halving = [*words(tmp_path, "sweep.search=halving", "precision=fp32,bf16", "seed=0,1")]
    other_space = [word if word != LR else LR.replace("1e-1", "1e-2") for word in optuna_words(tmp_path)]
    for asked, said in (
        (other_space, "search.space.optim.learning_rate tag"),
        (optuna_words(tmp_path, "trainer.max_steps=20"), "(trainer.max_steps 40 -> 20)"),  # gaps of other runs
        (halving, "search.search optuna -> halving"),
    ):
        capsys.readouterr()
        assert main(["train", *asked]) == 2
        assert said in capsys.readouterr().err
    assert len(kind.started) == 2
    apart = [word.replace("run.name=searched", "run.name=halved") for word in halving]
    make_jobs(monkeypatch, recipe_loss)
    assert main(["train", *apart]) == 0
    assert (
        main(["train", *(word.replace("run.name=searched", "run.name=halved") for word in optuna_words(tmp_path))]) == 2
    )
    assert "search.search halving -> optuna" in capsys.readouterr().err
    assert not (tmp_path / "default" / "halved" / "search.db").exists()


@pytest.mark.full
def test_a_search_without_recorded_shared_keys_is_resumed(tmp_path, monkeypatch, capsys):
    make_jobs(monkeypatch, loss)
    assert main(["train", *optuna_words(tmp_path, "sweep.trials=1")]) == 0
    file = tmp_path / "default" / "searched" / "sweep.json"
    about = json.loads(file.read_text())
    del about["search"]["derived"]  # as where the hash alone was noted
    file.write_text(json.dumps(about))
    assert main(["plan", *optuna_words(tmp_path, "trainer.max_steps=20")]) == 2
    assert "search.all_other_keys " in capsys.readouterr().err
    del about["search"]["all_other_keys"]
    file.write_text(json.dumps(about))
    kind = make_jobs(monkeypatch, loss)
    assert main(["train", *optuna_words(tmp_path, "sweep.trials=2")]) == 0
    assert (len(kind.started), len(trials_of(tmp_path))) == (1, 2)


def test_without_optuna_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["train", *optuna_words(tmp_path)]) == 2
    assert "pip install 'lightning-llm[search]'" in capsys.readouterr().err
