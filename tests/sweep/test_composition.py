"""Jobs of a sweep are composed from shared trees, to exactly the configs that Hydra composes one by one."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.override_parser.types import Override
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig

from lightning_llm.base.errors import ConfigError
from lightning_llm.config import compose as composition
from lightning_llm.config.compose import Composed, Composer, compose_config
from lightning_llm.config.overrides import MOST_JOBS, parse_overrides, values_of
from lightning_llm.config.sweep_space import compose_sweep

VALUES = [
    "trainer.max_steps=9", "++trainer.max_steps=11", "optim.learning_rate=1e-3", "optim={learning_rate: 2e-3}",
    "model.num_layers=1", "callbacks.sample=null", "callbacks.sample={prompt: a}", "~callbacks.sample",
    "callbacks.sample.prompt=b", "+logger.tags.who=me", "logger.tags={a: b}", "run.experiment=x", "run.name=y",
    "run.dir='${run.root}/${seed}'", "trainer.compile=true", "data.sources.code.weight=3", "schedule.total_steps=null",
    "precision.modules.exclude=['*.down_proj']", "trainer.threads='${trainer.devices}'", "trainer.max_step=1",
    "optim.learning_rate=fast", "data.cache_dir=???",
]  # fmt: skip
GROUPS = ["recipe=quickstart", "precision=mxfp8", "schedule=cosine", "callbacks=none", "~spikes"]
words = st.lists(st.sampled_from(VALUES) | st.sampled_from(GROUPS), max_size=4, unique=True)


def outcome(words: list[str], compose: Callable[..., Composed] = Composer.compose) -> list:
    """Return the composed jobs, or all that is wrong."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Composer, "compose", compose)
        try:
            jobs = compose_sweep(["run.name=not_the_time", *words])
        except ConfigError as error:
            return sorted(map(str, error.problems))
    return [(chosen, config.model_dump()) for chosen, config in jobs]


def composed_whole(self: Composer, parsed: list[Override]) -> Composed:
    """Return Hydra's composition of all overrides of one job; a chosen group replaces the preset's."""
    arguments = [self.forced(each) for each in parsed]
    files = tuple(word for word in arguments if not word.startswith(("++", "~")))
    return Composer(self.search, self.config_dir)._in_order(parsed, arguments, files)


some_words = given(words=words, swept=st.sampled_from(["seed=1,2", "precision=bf16,fp32", "optim.eps=1e-8,1e-6"]))
unhurried = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@settings(phases=[Phase.explicit], **unhurried)
@example(
    ["recipe=quickstart", "precision=mxfp8", "++trainer.max_steps=11", "run.dir='${run.root}/${seed}'"], "seed=1,2"
)
@example(["callbacks.sample={prompt: a}", "~callbacks.sample", "optim.learning_rate=fast"], "precision=bf16,fp32")
@some_words
def test_jobs_are_what_hydra_composes_one_by_one(words: list[str], swept: str) -> None:
    assert outcome([*words, swept]) == outcome([*words, swept], composed_whole)


@pytest.mark.full
@settings(max_examples=80, phases=[Phase.generate], **unhurried)
@some_words
def test_many_more_jobs_are_what_hydra_composes_one_by_one(words: list[str], swept: str) -> None:
    assert outcome([*words, swept]) == outcome([*words, swept], composed_whole)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list that records the overrides of each composition by Hydra from now on; caches are empty."""
    made, real = [], composition.compose
    composition.shipped_composer.cache_clear()

    def counted(*args: str, overrides: list[str], **more: bool) -> DictConfig:
        made.append(overrides)
        return real(*args, overrides=overrides, **more)

    monkeypatch.setattr(composition, "compose", counted)
    return made


def test_jobs_that_choose_the_same_files_are_composed_once(made: list[list[str]], tmp_path: Path) -> None:
    jobs = compose_sweep([f"run.root={tmp_path}", "precision=bf16,mxfp8", "seed=range(10)", "optim.eps=1e-8,1e-6"])
    assert len(jobs) == 40
    assert made == [[], ["precision=bf16"], ["precision=mxfp8"]]  # the sweep itself first
    jobs[0][1].logger.tags["of"] = "job 0"
    assert all("of" not in config.logger.tags for _, config in jobs[1:])


def test_a_recipe_that_a_rule_names_is_composed_once_for_all_jobs(made: list[list[str]], tmp_path: Path) -> None:
    rule = "precision.modules.casts=[{names: ['*.down_proj'], recipe: mxfp8_ocp}]"
    jobs = compose_sweep([f"run.root={tmp_path}", "precision=mxfp8", rule, "seed=range(5)"])
    assert made == [["precision=mxfp8"], ["precision=mxfp8_ocp"]]
    (casts,) = {config.precision.modules.casts for _, config in jobs}
    assert casts[0].fprop.x == compose_sweep(["precision=mxfp8_ocp"])[0][1].precision.fprop.x


def test_shipped_files_are_composed_once_per_process(made: list[list[str]]) -> None:
    words = ["precision=mxfp8", "run.name=mine"]
    first = compose_config([*words, "seed=1"])
    first.logger.tags["of"] = "the first"
    second = compose_config([*words, "seed=2"])
    assert made == [["precision=mxfp8"]]
    assert (first.seed, second.seed, "of" in second.logger.tags) == (1, 2, False)


def test_files_of_a_config_dir_are_read_each_time(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    for seed in (1, 2):
        (tmp_path / "recipe" / "mine.yaml").write_text(f"seed: {seed}\n")
        assert compose_config(["recipe=mine"], tmp_path).seed == seed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=range(0,100000)"], "values: seed more than 10,000"),
        (["seed=range(0,1000000000000)", "precision=bf16,fp32"], "values: seed more than 10,000, precision 2"),
        (["seed=shuffle(range(0,1000000000000))"], "values: seed more than 10,000"),
        (["seed=float(range(0,1e300,1e-300))"], "values: seed more than 10,000"),
        (["seed=sort(range(0,1000000000000),reverse=true)"], "values: seed more than 10,000"),
        (["seed=range(0,101)", "trainer.max_steps=range(1,101)"], "values: seed 101, trainer.max_steps 100"),
    ],
)
def test_more_jobs_than_anybody_means_are_refused_before_any_is_composed(
    words: list[str], said: str, made: list[list[str]]
) -> None:
    with pytest.raises(ConfigError) as error:
        compose_sweep(words)
    assert "sweep: would have more than 10,000 jobs" in str(error.value)
    assert said in str(error.value)
    assert len(made) <= 2


def test_a_shuffled_range_keeps_all_values() -> None:
    (parsed,) = parse_overrides(["seed=shuffle(range(0,50))"])
    assert sorted(map(int, values_of(parsed, MOST_JOBS))) == list(range(50))
    assert len(values_of(parsed, 20)) == 20


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("seed=range(0,3),range(5,7)", "seed: has a range among several values. Give one range, or the values"),
        ("seed=range(0,10,0)", "seed: range(0,10,0) cannot be listed: range() arg 3 must not be zero."),
        ("seed=interval(0,1)", "seed: is an interval, which cannot be enumerated"),
    ],
)
def test_values_that_cannot_be_listed_are_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_sweep([word, "precision=bf16"])
    assert said in str(error.value)


def test_looks_count_the_seeds_of_a_range_by_its_bounds() -> None:
    words = ["precision=bf16,fp8_current", "sweep.until=decided", "sweep.max_seeds=3"]
    with pytest.raises(ConfigError, match="values: precision 2, seed more than 10,000"):
        compose_sweep([*words, "seed=shuffle(range(0,1000000000000))"])


def test_more_seeds_than_that_are_refused_where_looks_ask_for_them() -> None:
    words = ["precision=bf16,fp8_current", "sweep.until=decided", "sweep.max_seeds=1000000000"]
    with pytest.raises(ConfigError, match=r"sweep\.max_seeds: has its last look at 1,000,000,000 seeds"):
        compose_sweep(words)
