"""data.max_tokens and data.epochs: windows, number of steps, rejected settings."""

from collections import Counter

import pytest

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.config_hash import differences_on_resume
from lightning_llm.config.derived_keys import steps_of
from lightning_llm.config.from_file import read_file
from lightning_llm.config.yaml_file import write_config
from lightning_llm.data.check import check_data
from lightning_llm.data.mixing.addressing import SampleOrder, Shares
from lightning_llm.data.opening import open_corpus
from tests.data.corpus_files import data_config

WINDOWS = {"a": 97, "b": 40}


def order(seed: int, limits: dict[str, int], **keys) -> SampleOrder:
    return SampleOrder(Shares({"a": 3.0, "b": 1.0}), WINDOWS, seed, limits=limits, **keys)


def test_a_bounded_source_gives_the_same_windows_in_every_epoch_and_under_every_seed():
    limits = {"a": 30, "b": 10}
    found = {}
    for seed in (0, 1):
        walked = [order(seed, limits).locate(i) for i in range(80)]  # two epochs of 40 windows
        of_a = [each.window for each in walked if each.source == 0]
        assert Counter(of_a) == dict.fromkeys(set(of_a), 2)
        assert len(set(of_a)) == 30
        assert max(of_a) > 30, "windows come from all of the source"
        found[seed] = of_a
    assert set(found[0]) == set(found[1])
    assert found[0] != found[1]
    smaller = {
        order(5, {"a": 12, "b": 4}).locate(i).window for i in range(16) if order(5, limits).locate(i).source == 0
    }
    assert smaller < set(found[0]), "a smaller bound is part of a larger one"
    assert [each.window for each in map(order(0, limits, shuffle=False).locate, range(40)) if each.source == 0] == list(
        range(30)
    )


def test_no_bound_leaves_every_address_as_it_was():
    plain = SampleOrder(Shares({"a": 3.0, "b": 1.0}), WINDOWS, 3)
    assert [plain.locate(i) for i in range(300)] == [order(3, WINDOWS).locate(i) for i in range(300)]


def test_a_corpus_is_bounded_by_weights_and_says_so(two_files, cache):
    config = data_config(cache, two_files, max_tokens=20 * 16, epochs=2.0)
    corpus = open_corpus(config, 0, 300)
    assert corpus.order.windows == [15, 5]
    windows = {(s.source, s.window) for s in (corpus.sample(i) for i in range(40))}
    assert len(windows) == 20
    whole = open_corpus(data_config(cache, two_files), 0, 300)
    assert corpus.fingerprint != whole.fingerprint
    assert corpus.validation_fingerprint == whole.validation_fingerprint
    assert corpus.fingerprint == open_corpus(config, 7, 300).fingerprint
    with pytest.raises(ConfigError, match=r"data\.max_tokens: 3,200,000 needs .* tokens of source 'a'"):
        open_corpus(data_config(cache, two_files, max_tokens=3_200_000), 0, 300)


def test_epochs_set_the_steps():
    assert steps_of(16, 40_000, 128, 8) == 624  # 312 windows
    words = ["recipe=data_constrained", "data.max_tokens=40e3"]
    assert compose_config(words).trainer.max_steps == 624
    assert compose_config([*words, "data.epochs=2.5"]).trainer.max_steps == 98
    assert compose_config([*words, "trainer.max_steps=624"]).trainer.max_steps == 624
    assert compose_config([*words, "data.epochs=null", "trainer.max_steps=7"]).trainer.max_steps == 7
    with pytest.raises(ConfigError, match=r"trainer\.max_steps: is 100, and data\.epochs makes it 624"):
        compose_config([*words, "trainer.max_steps=100"])
    with pytest.raises(ConfigError, match=r"trainer\.max_steps: is 480, and data\.epochs makes it 50"):
        compose_config(["recipe=quickstart", "data.max_tokens=51200", "data.epochs=2"])


def test_a_runs_file_keeps_and_remakes_the_steps(tmp_path):
    config = compose_config(["recipe=data_constrained"])
    write_config(config, tmp_path / "config.yaml")
    assert read_file(tmp_path / "config.yaml", []).checked() == config
    longer = read_file(tmp_path / "config.yaml", ["data.epochs=32"]).checked()
    assert longer.trainer.max_steps == 1248
    assert differences_on_resume(config, longer) == {}
    with pytest.raises(ConfigError, match=r"trainer\.max_steps: is 5"):
        read_file(tmp_path / "config.yaml", ["trainer.max_steps=5"]).checked()


def test_impossible_settings_are_rejected(two_files, cache):
    def said(**keys) -> str:
        return "\n".join(map(str, check_data(data_config(cache, two_files, **keys), 300, 1)))

    assert "data.epochs: is 2, but the length of an epoch is unknown" in said(epochs=2.0)
    assert "data.max_tokens: is 20, but one sequence per source takes 32" in said(max_tokens=20)
    phases = {"kind": "phases", "phases": {"one": {}, "two": {"start": 0.5, "weights": {"b": 2}}}}
    silent = {name: {**source, "weight": 0.0 if name == "b" else 1.0} for name, source in two_files.items()}
    config = data_config(cache, silent, mixture=phases, max_tokens=400)
    assert "data.sources.b.weight: is 0, and data.max_tokens is divided by weight" in "\n".join(
        map(str, check_data(config, 300, 1))
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.max_tokens=nan"], "data.max_tokens=nan: must be a whole number of tokens, such as 200000000"),
        (["data.max_tokens=-inf"], "data.max_tokens=-inf: must be a whole number"),
        (["data.max_tokens=200M"], "data.max_tokens='200M': must be a whole number"),
        (["data.max_tokens=-3"], "data.max_tokens=-3: must be greater than 0"),
        (["data.max_tokens=1e300"], "data.max_tokens=1e+300: must be less than"),
        (["data.epochs=nan"], "data.epochs=nan: must be a finite number"),
        (["data.epochs=1e30"], "data.epochs: is 1e+30, which makes more than 2,147,483,647 steps"),
        (["data.sequence_length=nan"], "data.sequence_length=nan: must be a valid integer"),
    ],
)
def test_a_wrong_run_length_is_one_line(words, said):
    with pytest.raises(ConfigError) as refused:
        compose_config(["recipe=data_constrained", *words])
    (problem,) = refused.value.problems
    assert said in str(problem)
