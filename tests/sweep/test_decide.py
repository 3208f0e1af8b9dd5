"""Sweeps until each verdict is decided: the seeds that run, looks continued after any end, declared terms."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_llm.__main__ import main
from lightning_llm.sweep import decide
from tests.sweep.made_jobs import Killed, killed_after, make_jobs

GAPS = {"bf16": 0.0, "fp8_current": 0.0, "fp8_delayed": 0.1, "mxfp8": 0.0095}
NOISE = np.random.default_rng(3).normal(0, 0.003, (4, 12))


def loss(config: dict[str, Any], step: int) -> float:
    """A curve that falls by the same for all, an effect of the seed, and each recipe's own gap and noise."""
    name, seed = config["precision"]["name"], config["seed"]
    return 4 - step / 20 + 0.1 * seed + GAPS[name] + float(NOISE[list(GAPS).index(name), seed])


def words(folder: Path, *more: str) -> list[str]:
    """Return the arguments of the sweep, `more` in place of those of the same key."""
    keys = tuple(f"{word.partition('=')[0]}=" for word in more)
    usual = [
        "-m", "model=llama_tiny", "data=python", "precision=bf16,fp8_current,fp8_delayed", "trainer.max_steps=20",
        "trainer.validate_every_steps=10", "schedule.warmup_steps=2", "callbacks=none", "logger=none",
        f"run.root={folder}", "run.name=looks", "sweep.until=decided", "sweep.max_seeds=6",
    ]  # fmt: skip
    return [*(word for word in usual if not word.startswith(keys)), *more]


def seeds_by_recipe(started: list[dict[str, Any]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for config in started:
        found.setdefault(config["precision"]["name"], []).append(config["seed"])
    return found


def verdicts(capsys: pytest.CaptureFixture[str], *more: str, expect: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["compare", "--json", *more]) == expect
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("undrawn")
def test_recipes_get_seeds_until_they_are_decided(tmp_path, monkeypatch, capsys):
    started = make_jobs(monkeypatch, loss).started
    assert main(["plan", *words(tmp_path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["sequential"]["looks"] == [3, 4, 5, 6]
    assert (plan["sequential"]["first_jobs"], plan["sequential"]["most_jobs"]) == (9, 18)
    assert not list(tmp_path.iterdir())

    assert main(["train", *words(tmp_path)]) == 0
    told = capsys.readouterr().out
    seeds = seeds_by_recipe(started)
    assert seeds["fp8_delayed"] == [0, 1, 2]  # ten margins worse, and lossy at the first look
    assert len(seeds["fp8_current"]) > 3  # noise of a third of the margin
    assert seeds["bf16"] == seeds["fp8_current"] == list(range(len(seeds["bf16"])))
    assert "every verdict is decided" in told

    folder = tmp_path / "default" / "looks"
    found = verdicts(capsys, str(folder))
    rows = {row["name"]: row for row in found["verdicts"]}
    assert (rows["fp8_delayed"]["verdict"], rows["fp8_delayed"]["look"]["number"]) == ("lossy", 1)
    assert rows["fp8_current"]["verdict"] == "lossless"
    assert rows["fp8_current"]["look"]["seeds"] == len(seeds["bf16"]) == rows["fp8_current"]["pairs"]
    assert rows["fp8_delayed"]["pairs"] == 3  # the interval that decided it
    assert "look 1 of 4" in rows["fp8_delayed"]["line"]
    assert "95 % repeated CI" in rows["fp8_delayed"]["line"]
    assert (found["advice"], found["looks"]) == (None, [])
    assert not (folder / "compare" / "looks.json").exists()
    about = json.loads((folder / "sweep.json").read_text())
    assert len(about["jobs"]) == len(started)  # what no look asked for is not missing
    assert about["sequential"] == found["sequential"]

    assert main(["train", *words(tmp_path)]) == 0  # nothing is left to do
    assert sum(map(len, seeds.values())) == len(started)
    says_which_run_each_look_waits_for(folder, capsys)


def says_which_run_each_look_waits_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All recipes share a look, so a damaged run of one delays both, and each reports the reason once."""
    (folder / "1" / "summary.json").write_text('{"sta')  # fp8_current at seed 0
    capsys.readouterr()
    assert main(["compare", "--json", str(folder)]) == 2
    told = capsys.readouterr()
    for row in json.loads(told.out)["verdicts"]:
        assert (row["look"]["number"], row["look"]["waits_for"]) == (0, [str(folder / "1")])
        assert (
            row["line"]
            .partition("; records not verified")[0]
            .endswith(
                "open at look 0 of 4; the next, after 3 seeds, waits for fp8_current at seed 0 (job 1: unreadable)"
            )
        )
        assert row["line"].count("seed 0") == 1
    (line,) = (line for line in told.err.splitlines() if line.startswith("  - "))
    assert "is not finished: unreadable (cannot be read as a run: summary.json is damaged: " in line
    shutil.copy(folder / "0" / "summary.json", folder / "1" / "summary.json")
    (folder / "3" / "metrics.jsonl").write_text("")  # bf16 at seed 1
    assert main(["compare", "--json", str(folder)]) == 2
    told = capsys.readouterr()
    assert all("waits for bf16 at seed 1 (job 3: " in row["line"] for row in json.loads(told.out)["verdicts"])


@pytest.mark.usefixtures("undrawn")
def test_other_terms_than_the_declared_do_not_have_their_error(tmp_path, monkeypatch, capsys):
    make_jobs(monkeypatch, loss)
    assert main(["train", *words(tmp_path, "sweep.margin=0.02")]) == 0
    folder = str(tmp_path / "default" / "looks")
    declared = verdicts(capsys, folder)
    assert (declared["margin"], declared["sequential"]["margin"]) == (0.02, 0.02)
    other = verdicts(capsys, folder, "--margin", "0.03")
    assert (other["margin"], other["sequential"]) == (0.03, None)
    assert any("margin 0.03 in place of 0.02" in note and "declared error" in note for note in other["notes"])
    assert all(row["look"] is None for row in other["verdicts"])
    assert main(["compare", folder, "--all-pairs"]) == 2
    told = capsys.readouterr().err
    assert "--all-pairs: cannot be used for a sweep with declared looks" in told
    assert f"compare {folder}/[0-9]*/ --all-pairs" in told
    runs = sorted(str(each) for each in Path(folder).glob("[0-9]*/"))
    pairs = verdicts(capsys, *runs, "--all-pairs")
    assert len(pairs["all_pairs"]) == 3
    assert any("do not have the declared error" in note for note in pairs["notes"])
    part = verdicts(capsys, *(f"{folder}/{number}" for number in range(6)))
    assert any("not all of the sweep's" in note for note in part["notes"])
    assert main(["train", *words(tmp_path, "sweep.margin=0.01")]) == 2
    assert "begun with other terms (sequential.margin 0.02 -> 0.01)" in capsys.readouterr().err

    file = Path(folder) / "sweep.json"
    file.write_text(file.read_text().replace('"margin": 0.02', '"margin": 0.05'))
    assert main(["compare", folder]) == 2
    assert "changed after it was declared" in capsys.readouterr().err


@pytest.mark.full
def test_no_other_recipe_or_model_is_added_to_declared_looks(tmp_path, monkeypatch, capsys):
    two = "precision=bf16,fp8_delayed"
    started = make_jobs(monkeypatch, loss).started
    assert main(["train", *words(tmp_path, two)]) == 0
    plain = [word for word in words(tmp_path) if not word.startswith(("sweep.", "precision="))]
    ran = len(started)
    for asked, said in (
        (words(tmp_path, "precision=bf16,mxfp8"), "precision=fp8_delayed, so precision=mxfp8 cannot be added: its"),
        (words(tmp_path, two, "model=llama_20m"), "model.hidden_size 192 -> "),
        ([*plain, "precision=bf16,mxfp8", "seed=0,1,2"], "so precision=mxfp8 cannot be added: its"),
        ([*plain, two, "optim.learning_rate=1e-4", "seed=7"], "(optim.learning_rate 0.001 -> 0.0001)"),
    ):
        capsys.readouterr()
        assert main(["train", *asked]) == 2
        told = capsys.readouterr().err
        assert "was begun with looks declared for precision=bf16; precision=fp8_delayed, so" in told
        assert said in told
    assert len(started) == ran
    assert main(["train", *words(tmp_path, two)]) == 0
    assert main(["train", *plain, two, "seed=7"]) == 0  # more seeds are no other recipe
    assert len(started) == ran + 2


def test_a_sweep_that_was_killed_goes_on_and_repeats_nothing(tmp_path, monkeypatch, capsys):
    whole, two = make_jobs(monkeypatch, loss), "precision=bf16,fp8_current"
    assert main(["train", *words(tmp_path / "whole", two)]) == 0
    ran: list[tuple[str, int]] = []
    for limit in (2, 4, 1):  # jobs before it dies: within the first look, between two looks, within the second
        kind = killed_after(make_jobs(monkeypatch, loss), limit)
        with pytest.raises(Killed):
            main(["train", *words(tmp_path / "killed", two)])
        ran += [(config["precision"]["name"], config["seed"]) for config in kind.ended]
    kind = make_jobs(monkeypatch, loss)
    assert main(["train", *words(tmp_path / "killed", two)]) == 0
    ran += [(config["precision"]["name"], config["seed"]) for config in kind.ended]
    assert "every verdict is decided" in capsys.readouterr().out
    assert sorted(ran) == sorted((config["precision"]["name"], config["seed"]) for config in whole.ended)


@pytest.mark.full
def test_a_look_is_not_taken_while_a_run_has_crashed(tmp_path, monkeypatch, capsys):
    lost = lambda config: (config["precision"]["name"], config["seed"]) == ("bf16", 1)  # noqa: E731
    started = make_jobs(monkeypatch, loss, dies=lost).started
    assert main(["train", *words(tmp_path)]) == 1
    assert len(started) == 9
    assert "look   " not in capsys.readouterr().out
    started = make_jobs(monkeypatch, loss).started
    assert main(["train", *words(tmp_path)]) == 0
    assert (started[0]["precision"]["name"], started[0]["seed"]) == ("bf16", 1)


@pytest.mark.full
def test_a_recipe_near_the_margin_uses_all_seeds(tmp_path, monkeypatch, capsys):
    started = make_jobs(monkeypatch, loss).started
    assert main(["train", *words(tmp_path, "precision=bf16,mxfp8", "sweep.max_seeds=5")]) == 0
    assert seeds_by_recipe(started)["mxfp8"] == [0, 1, 2, 3, 4]
    told = capsys.readouterr().out
    assert "look 3 of 3, the last: the declared 5 seeds are spent" in told
    assert "no further look: some verdicts stay open" in told


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["seed=0,1,2"], "seed: has 3 values, and the last declared look is at 6 seeds"),
        (["sweep.looks=[4,3]"], "looks=[4, 3]: must ascend"),
        (
            ["precision=bf16"],
            "sweep.until: has nothing to decide: all jobs have the same recipe. Add a baseline",
        ),
        (["sweep.search=halving"], "until and search exclude each other"),
        (["sweep.baseline=precision=fp32"], "sweep.baseline: 'fp32' is the level of no run. Known here: bf16, "),
        (["precision=mxfp8,mxfp4_sr"], "sweep.baseline: none of the runs is bf16 or fp32. Choose a baseline: sweep"),
        (
            ["sweep.margin=2%"],
            "sweep.margin: 2% needs the baseline at two other numbers of tokens, about half and twice",
        ),
        (["sweep.margin=2 percent"], "sweep.margin='2 percent': must be above 0"),
        (["sweep.margin=2%", "sweep.until=null", "sweep.search=halving"], "must be in nats with search=halving"),
    ],
)
def test_invalid_looks_are_refused_before_anything_starts(more, said, tmp_path, capsys):
    assert main(["train", *words(tmp_path, *more)]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_a_sweep_that_was_begun_without_looks_cannot_declare_them(tmp_path, monkeypatch, capsys):
    make_jobs(monkeypatch, loss)
    plain = [word for word in words(tmp_path) if not word.startswith("sweep.")]
    assert main(["train", *plain, "seed=0,1,2"]) == 0
    assert main(["train", *words(tmp_path)]) == 2
    assert "was begun without declared terms, which must precede the first run" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "default")


def test_a_metric_that_no_job_records_is_refused_before_any_starts(tmp_path, capsys):
    assert main(["plan", *words(tmp_path), "sweep.metric=val_los"]) == 2
    assert "sweep.metric: is 'val_los', which these jobs' validations do not record" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.usefixtures("undrawn")
def test_a_margin_in_tokens_is_declared_and_judged_by_the_baselines_other_lengths(tmp_path, monkeypatch, capsys):
    """Of losses that are a line in tokens: 5 % fewer are 1 / 21 of the fall by 20 steps, which is 1 nat."""
    started = make_jobs(monkeypatch, loss).started
    recipe = tmp_path / "conf" / "recipe" / "mine.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(
        "# @package _global_\n"
        "trainer: {max_steps: 20}\n"
        "hydra: {sweeper: {params: {precision: 'bf16,fp8_current,fp8_delayed'}}}\n"
        "sweep: {also: ['precision=bf16 trainer.max_steps=10,40'], margin: 5%, looks: [2, 3]}\n"
    )
    asked = [word for word in words(tmp_path, "sweep.max_seeds=3") if not word.startswith(("precision", "trainer.max"))]
    assert main(["train", *asked, "recipe=mine", "--config-dir", str(tmp_path / "conf")]) == 0
    assert "every verdict is decided" in capsys.readouterr().out
    lengths = {(config["precision"]["name"], config["trainer"]["max_steps"]) for config in started}
    assert lengths == {("bf16", 10), ("bf16", 20), ("bf16", 40), ("fp8_current", 20), ("fp8_delayed", 20)}
    folder = str(tmp_path / "default" / "looks")
    assert json.loads((Path(folder) / "sweep.json").read_text())["sequential"]["margin"] == "5%"
    found = verdicts(capsys, folder)
    rows = {row["name"]: row for row in found["verdicts"]}
    assert (rows["fp8_current"]["verdict"], rows["fp8_delayed"]["verdict"]) == ("lossless", "lossy")
    assert rows["fp8_delayed"]["margin"] == pytest.approx(1 / 21, rel=0.2)
    assert rows["fp8_delayed"]["token_margin"] == 0.05
    worth = rows["fp8_delayed"]["effective_data"]
    assert worth["more_tokens_ci"][0] > 0.05  # of its look, as the verdict
    assert worth["seeds"] == rows["fp8_delayed"]["look"]["seeds"] == 3
    assert found["sequential"]["margin"] == "5%"
    assert verdicts(capsys, folder, "--margin", "5%")["sequential"] == found["sequential"]
    assert any(
        "margin 0.01 in place of 5 % of tokens" in note
        for note in verdicts(capsys, folder, "--margin", "0.01")["notes"]
    )


def test_the_baseline_runs_as_many_seeds_as_any_recipe_needs(monkeypatch):
    """Whatever the order of the verdicts; a recipe that is decided gets no more, and runs in no pair as many as any."""

    def job(name: str, seed: int) -> SimpleNamespace:
        return SimpleNamespace(folder=Path(f"{name}-{seed}"), config=SimpleNamespace(name=name, seed=seed), key=name)

    jobs = [job(name, seed) for seed in range(9) for name in ("bf16", "more", "fewer", "decided", "alone")]
    looks = [SimpleNamespace(seeds=count) for count in (3, 5, 8)]
    design = SimpleNamespace(
        looks=looks, seeds=tuple(range(9)), seeds_at=lambda look: range(look.seeds), terms=None, baseline=None
    )

    def verdict(name: str, coming: SimpleNamespace | None) -> SimpleNamespace:
        pairs = [SimpleNamespace(run=job(name, seed), baseline=job("bf16", seed)) for seed in range(3)]
        sequential = SimpleNamespace(coming=coming)
        return SimpleNamespace(name=name, family=SimpleNamespace(recipes={name: pairs}), sequential=sequential)

    found = [verdict("more", looks[2]), verdict("fewer", looks[1]), verdict("decided", None)]
    monkeypatch.setattr(decide, "state_of", lambda folder: "finished" if int(folder.name[-1]) < 3 else "new")
    monkeypatch.setattr(decide, "read_run", lambda folder: folder)
    monkeypatch.setattr(decide, "kind_of", lambda config: config.name)
    names = ("bf16", "more", "alone")
    for verdicts_found in (found, found[::-1]):
        monkeypatch.setattr(decide, "compare_runs", lambda *_, v=verdicts_found, **__: SimpleNamespace(verdicts=v))
        coming = decide.next_jobs(SimpleNamespace(jobs=jobs), design).jobs
        seeds = {name: [each.config.seed for each in coming if each.config.name == name] for name in names}
        assert seeds == {name: [3, 4, 5, 6, 7] for name in names}
        assert [each.config.seed for each in coming if each.config.name == "fewer"] == [3, 4]
        assert not any(each.config.name == "decided" for each in coming)
