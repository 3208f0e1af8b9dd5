"""Jobs of a sweep and their names over repeated starts. Seconds."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from lightning_llm.base.errors import ConfigError
from lightning_llm.cli.command_line import _parser
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import config_hash, training_hash
from lightning_llm.config.overrides import typed_value
from lightning_llm.config.sweep_space import compose_sweep
from lightning_llm.tracking import sweep_definition as definition
from lightning_llm.tracking.sweep_definition import (
    Sweep,
    SweepSource,
    command_to_go_on,
    command_with_seeds,
    define,
    write_sweep,
)
from tests.sweep.short_jobs import sweep_of

RECIPE = """# @package _global_
# Two precisions, and bf16 against itself.
run: {experiment: mine}
hydra: {sweeper: {params: {precision: "bf16,fp32", seed: "0,1"}}}
sweep:
  also: ["precision=bf16 data.micro_batch_size=1 seed=0,1"]
"""


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    (tmp_path / "groups" / "recipe").mkdir(parents=True)
    (tmp_path / "groups" / "recipe" / "mine.yaml").write_text(RECIPE)
    return tmp_path / "groups"


def test_a_recipe_adds_jobs_beside_its_product(recipes: Path) -> None:
    jobs = compose_sweep(["recipe=mine"], recipes)
    assert [(c.precision.name, c.data.micro_batch_size, c.seed) for _, c in jobs] == [
        ("bf16", 4, 0), ("bf16", 4, 1), ("fp32", 4, 0), ("fp32", 4, 1), ("bf16", 1, 0), ("bf16", 1, 1),
    ]  # fmt: skip
    assert jobs[4][0] == ["precision=bf16", "data.micro_batch_size=1", "seed=0"]


@pytest.mark.parametrize("words", [["seed=0,0,1"], ["seed=0", "precision=bf16,fp32,bf16"]])
def test_duplicate_values_are_refused(words: list[str], recipes: Path) -> None:
    with pytest.raises(ConfigError, match=r"has (0|bf16) more than once.*Give it once"):
        compose_sweep(["recipe=mine", *words], recipes)


def test_typed_values_replace_a_recipes_choices(recipes: Path) -> None:
    jobs = compose_sweep(["recipe=mine", "seed=5,6", "precision=mxfp8", "trainer.max_steps=9"], recipes)
    assert [(c.precision.name, c.seed, c.data.micro_batch_size) for _, c in jobs] == [
        ("mxfp8", 5, 4), ("mxfp8", 6, 4), ("bf16", 5, 1), ("bf16", 6, 1),
    ]  # fmt: skip
    assert {config.trainer.max_steps for _, config in jobs} == {9}


def test_lines_that_are_typed_keep_their_choices(recipes: Path) -> None:
    also = "sweep.also=['precision=bf16 seed=3 trainer.max_steps=5,20']"
    jobs = compose_sweep(["recipe=mine", "trainer.max_steps=10", also], recipes)
    assert [(c.seed, c.trainer.max_steps) for _, c in jobs] == [(0, 10), (1, 10), (0, 10), (1, 10), (3, 5), (3, 20)]


def test_lines_of_sweep_also_add_jobs_without_a_recipe() -> None:
    also = "sweep.also=['precision=bf16 data.micro_batch_size=1']"
    jobs = compose_sweep(["model=llama_tiny", "data=python", "precision=bf16,mxfp8", also])
    assert [words for words, _ in jobs] == [
        ["precision=bf16"], ["precision=mxfp8"], ["precision=bf16", "data.micro_batch_size=1"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("also", "said"),
    [
        ('{"a": 1}', "sweep.also: must be a list of lines"),
        ("[3]", "sweep.also.0: must be a list of lines"),
        ('["precision=bf16"], untill: decided', "sweep.untill: unknown key. Did you mean 'until'"),
    ],
)
def test_other_keys_of_a_sweep_are_refused(also: str, said: str, recipes: Path) -> None:
    (recipes / "recipe" / "mine.yaml").write_text(f"# @package _global_\n# x\nsweep: {{also: {also}}}\n")
    with pytest.raises(ConfigError, match=said):
        compose_sweep(["recipe=mine", "seed=0,1"], recipes)


def test_a_recipe_that_is_a_sweep_is_no_single_run(recipes: Path) -> None:
    with pytest.raises(ConfigError, match="Add -m"):
        compose_config(["recipe=mine"], recipes)


def test_a_recipe_that_is_a_sweep_is_not_one_of_several(recipes: Path) -> None:
    with pytest.raises(ConfigError, match="recipe: has several values, but recipe=mine is a sweep itself"):
        compose_sweep(["recipe=quickstart,mine", "run.experiment=x"], recipes)
    assert len(compose_sweep(["recipe=quickstart,llama3_8b_fsdp2", "run.experiment=x"], recipes)) == 2


def test_the_same_words_are_the_same_sweep_and_others_are_not(tmp_path: Path) -> None:
    first = sweep_of(tmp_path, "seed=0,1")
    assert sweep_of(tmp_path, "seed=1,0").folder == first.folder  # the order does not matter
    assert sweep_of(tmp_path, "seed=0,1", "logger=none", "launcher.at_once=2").folder == first.folder
    assert sweep_of(tmp_path, "seed=0,1,2").folder != first.folder
    assert [job.key for job in first.jobs] == [training_hash(job.config) for job in first.jobs]
    assert [job.folder for job in first.jobs] == [first.folder / "0", first.folder / "1"]
    assert first.axes == {"seed": ["0", "1"]}


def test_a_named_sweep_grows_and_its_jobs_keep_their_numbers(tmp_path: Path) -> None:
    write_sweep(sweep_of(tmp_path, "seed=1,2", name="grown"))
    grown = sweep_of(tmp_path, "seed=0,1,2,3", name="grown")
    assert [(job.config.seed, job.number) for job in grown.jobs] == [(0, 2), (1, 0), (2, 1), (3, 3)]
    write_sweep(sweep_of(tmp_path, "seed=3", name="grown"))
    about = json.loads((tmp_path / "default" / "grown" / "sweep.json").read_text())
    assert [each["number"] for each in about["jobs"]] == [0, 1, 2]
    assert about["axes"] == {"seed": ["1", "2", "3"]}  # of all that is listed, not of the last start alone


@pytest.mark.full
def test_more_seeds_by_the_printed_command_repeat_nothing(
    tmp_path: Path, recipes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command for seeds 0, 1, 2 of a sweep nobody named composes to its four jobs of old and to three new ones."""
    root = tmp_path / "runs of mine"

    def typed(*words: str) -> Sweep:
        return define(compose_sweep(words, recipes), typed_value(words, "run.name"), SweepSource(words, recipes))

    first = typed("recipe=mine", f"run.root={root}", "seed=0,1", "optim.learning_rate=2e-3", "logger.tags.who=a b")
    write_sweep(first)
    program, *words = shlex.split(command_with_seeds(first.folder, [2, 0, 1]))
    assert Path(program).name == "lightning-llm"
    arguments = _parser().parse_args(words)
    assert (arguments.verb, arguments.multirun, arguments.config_dir) == ("train", True, recipes)
    assert arguments.overrides == [
        "recipe=mine", "optim.learning_rate=2e-3", "logger.tags.who=a b", "seed=0,1,2",
        f"run.name={first.folder.name}", f"run.root={root}",
    ]  # fmt: skip
    grown = typed(*arguments.overrides)
    assert grown.folder == first.folder
    known = {job.key: job.number for job in first.jobs}
    assert {job.number for job in grown.jobs if job.key in known} == set(known.values())
    assert sorted(job.number for job in grown.jobs if job.key not in known) == [6, 7, 8]
    write_sweep(grown)  # by more seeds alone: still one command
    assert command_with_seeds(first.folder, [0]).count("train -m") == 1
    write_sweep(typed("recipe=mine", f"run.root={root}", "precision=mxfp8", "seed=0", f"run.name={first.folder.name}"))
    both = command_with_seeds(first.folder, [0, 9]).split(" && ")
    assert ["precision=mxfp8" in shlex.split(each) for each in both] == [False, True]
    monkeypatch.setenv("LIGHTNING_LLM_OUTPUTS", str(root))
    assert "run.root" not in command_with_seeds(first.folder, [0])


def test_a_printed_command_with_a_relative_path_says_where_to_type_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "the text"
    place.mkdir()
    words = ["data=jsonl", "data.sources.jsonl.path=a.jsonl", "seed=0,1", f"run.root={tmp_path}"]

    def typed(*words: str) -> Sweep:
        return define(compose_sweep(words), typed_value(words, "run.name"), SweepSource(words))

    monkeypatch.chdir(place)
    first = typed(*words)
    write_sweep(first)
    monkeypatch.chdir(tmp_path)
    for printed in (command_to_go_on(first), command_with_seeds(first.folder, [0, 1])):
        change, command = printed.split(" && ")
        monkeypatch.chdir(shlex.split(change)[1])
        again = typed(*_parser().parse_args(shlex.split(command)[1:]).overrides)
        assert [job.key for job in again.jobs] == [job.key for job in first.jobs]
        assert [job.config for job in again.jobs] == [job.config for job in first.jobs]
    monkeypatch.chdir(tmp_path)
    assert typed(*words).folder != first.folder  # another text


def test_the_same_run_twice_is_two_jobs(tmp_path: Path, recipes: Path) -> None:
    (recipes / "recipe" / "mine.yaml").write_text(RECIPE.replace("precision=bf16 data.micro_batch_size=1 seed", "seed"))
    jobs = define(compose_sweep([f"run.root={tmp_path}", "recipe=mine", "precision=fp32"], recipes), None).jobs
    assert [(job.number, job.config.seed) for job in jobs] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert [job.key for job in jobs[2:]] == [f"{job.key}-1" for job in jobs[:2]]


def test_jobs_that_differ_in_unhashed_keys_stay_separate(tmp_path: Path) -> None:
    words = ["precision=mxfp8", "precision.casts=eager"]
    first = sweep_of(tmp_path, *words, "precision.backend=emulated,auto")
    write_sweep(first)
    again = sweep_of(tmp_path, *words, "precision.backend=auto,emulated")
    assert again.folder == first.folder
    assert [(job.number, job.config.precision.backend) for job in again.jobs] == [(1, "auto"), (0, "emulated")]
    plain = sweep_of(tmp_path, *words, "precision.backend=emulated", "seed=0,1")
    assert [job.key for job in plain.jobs] == [training_hash(job.config) for job in plain.jobs]


def test_observers_make_no_other_sweep_and_one_of_an_earlier_version_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["precision=bf16,fp32"]
    averaged = "+callbacks.ema={_target_: lightning.pytorch.callbacks.EMAWeightAveraging}"
    observed = [(), ("callbacks=none",), ("callbacks.progress=null", "callbacks.sample.prompt=x")]
    assert len({sweep_of(tmp_path, *words, *more).hash for more in observed}) == 1
    assert sweep_of(tmp_path, *words, averaged).hash != sweep_of(tmp_path, *words).hash
    shown = sweep_of(tmp_path, "callbacks=none,default").jobs
    assert len({training_hash(job.config) for job in shown}) == 1
    assert len({job.key for job in shown}) == 2
    with monkeypatch.context() as earlier:
        earlier.setattr(definition, "training_hash", config_hash)
        earlier.setattr(definition, "UNHASHED", ())
        before = sweep_of(tmp_path, *words)
        write_sweep(before)
    again = sweep_of(tmp_path, *words)
    assert (again.folder, again.hash) == (before.folder, before.hash)
    assert [(job.number, job.key) for job in again.jobs] == [(job.number, job.key) for job in before.jobs]
    grown = sweep_of(tmp_path, "precision=bf16,fp16", name=before.folder.name)
    assert [job.number for job in grown.jobs] == [0, 2]


def test_a_folder_of_another_sweep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "default" / "taken").mkdir(parents=True)
    (tmp_path / "default" / "taken" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"does not contain a valid sweep.*run\.name"):
        sweep_of(tmp_path, "seed=0,1", name="taken")


@pytest.mark.parametrize(
    "damage",
    [
        [],
        {},
        {"jobs": None},
        {"jobs": [{}]},
        {"jobs": [{"number": -5, "key": "a"}]},
        {"jobs": [{"number": "../../evil", "key": "a"}]},
        {"jobs": [{"number": 0, "key": "a"}, {"number": 0, "key": "b"}]},
        {"jobs": [{"number": 0, "key": "a"}, {"number": 1, "key": "a"}]},
    ],
    ids=str,
)
def test_a_damaged_sweep_file_calls_no_job_finished(damage: Any, tmp_path: Path) -> None:
    whole = sweep_of(tmp_path, "seed=0,1", name="one")
    write_sweep(whole)
    (whole.folder / "sweep.json").write_text(json.dumps(damage))
    with pytest.raises(ConfigError, match="it is damaged"):
        sweep_of(tmp_path, "seed=3,4", name="one")


def test_a_sweep_over_experiments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be the same for all jobs"):
        sweep_of(tmp_path, "run.experiment=a,b")


def test_an_old_sweep_file_does_not_reuse_folder_numbers(tmp_path: Path) -> None:
    """Else a finished run of another seed would pass for the new job's."""
    whole = sweep_of(tmp_path, "seed=0,1,2", name="grown")
    write_sweep(whole)
    older = (whole.folder / "sweep.json").read_bytes()
    (whole.folder / "3").mkdir()
    (whole.folder / "sweep.json").write_bytes(older)
    assert [job.number for job in sweep_of(tmp_path, "seed=0,1,2,7", name="grown").jobs] == [0, 1, 2, 4]
