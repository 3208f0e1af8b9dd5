"""Mixtures: what phases draw against a walk sample by sample; watched sources, weight 0; every registered kind."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.schema.data import MIXTURES, DataConfig
from lightning_llm.data.check import check_data
from lightning_llm.data.corpus import Corpus, ValidationBatch
from lightning_llm.data.mixing.addressing import SampleOrder, Shares
from lightning_llm.data.mixing.weights import Phases
from lightning_llm.data.opening import open_corpus
from lightning_llm.data.report import phase_reports, planned_phases, source_reports
from lightning_llm.data.scoring import COLUMNS, write_scores
from tests.data.corpus_files import data_config, words, write_jsonl

VOCABULARY = 300
TWO_PHASES = {
    "kind": "phases",
    "phases": {"main": {"weights": {"b": 0}}, "anneal": {"start": 0.75, "weights": {"a": 1, "b": 4}}},
}
KEYS = {"phases": TWO_PHASES}
"""Keys that a kind needs in addition to its name, with a table of scores if it needs one."""

weight = st.one_of(st.just(0.0), st.floats(0.05, 10))
weights_of_three = st.lists(weight, min_size=3, max_size=3).filter(any)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1500), weights_of_three), min_size=1, max_size=4), st.integers(0, 2**31))
def test_phases_are_their_shares_one_after_the_other(drawn: list[tuple[int, list[float]]], seed: int) -> None:
    """Against a walk with a counter per source: no window twice in an epoch, across phases; shares hold in each."""
    phases = {
        f"p{i}": (first if i else 0, dict(zip("abc", weights, strict=True))) for i, (first, weights) in enumerate(drawn)
    }
    mixture, windows = Phases(phases), {"a": 7, "b": 40, "c": 3000}
    order = SampleOrder(mixture, windows, seed)
    shares = {name: Shares(weights) for name, (_, weights) in phases.items()}
    total, counts, taken = 2_000, [0, 0, 0], Counter()
    for index in range(total):
        begun = [(first, number) for number, (first, _) in enumerate(phases.values()) if first <= index]
        first, number = max(begun)
        source = shares[f"p{number}"].ordinal(index - first)[0]
        address = order.locate(index)
        assert (address.source, address.epoch) == (source, counts[source] // order.windows[source])
        counts[source] += 1
        taken[address.source, address.epoch, address.window] += 1
    assert set(taken.values()) == {1}
    assert mixture.drawn(total) == counts
    found = list(mixture.phases(total))
    assert [sum(each) for each in zip(*(phase.drawn for phase in found), strict=True)] == counts
    assert [phase.first for phase in found[1:]] == [phase.last for phase in found[:-1]]
    assert (found[0].first, found[-1].last) == (0, total)


@pytest.mark.parametrize("kind", MIXTURES)
def test_every_mixture_counts_its_draws(kind: str, tmp_path: Path, two_files: dict[str, Any]) -> None:
    if MIXTURES[kind].shares_by_tokens:
        two_files = {name: {**source, "weight": 1.0} for name, source in two_files.items()}
    keys = {"kind": kind} | KEYS.get(kind, {})
    if "scores" in MIXTURES[kind].model_fields:
        columns = {name: [1] for name in COLUMNS} | {"source": ["a"]}  # documents are looked for by who opens a corpus
        write_scores(tmp_path / "scores.parquet", columns, {})
        keys["scores"] = str(tmp_path / "scores.parquet")
    config = data_config(tmp_path, two_files, mixture=keys)
    assert check_data(config, VOCABULARY, 1) == []
    assert DataConfig.model_validate(config.model_dump()) == config
    mixture = config.chosen_mixture.build(config.trained_weights, step_samples=8, max_steps=40)
    assert list(mixture.names) == ["a", "b"]
    counts = [0, 0]
    for index in range(8 * 40):
        assert mixture.drawn(index) == counts
        source, ordinal = mixture.ordinal(index)
        assert ordinal == counts[source]
        counts[source] += 1
    phases = list(mixture.phases(8 * 40))
    assert [sum(each) for each in zip(*(phase.drawn for phase in phases), strict=True)] == counts
    for weights in ({"a": 3.0, "b": 1.0}, {"a": 3.0, "b": 0.0}):
        counts = config.chosen_mixture.build(weights, step_samples=8, max_steps=40).drawn(8 * 40)
        drawn = {name for name, count in zip(weights, counts, strict=True) if count}
        assert set(config.chosen_mixture.drawn(weights)) == drawn


def test_phases_of_a_corpus(cache: Path, two_files: dict[str, Any]) -> None:
    config = data_config(cache, two_files, mixture=TWO_PHASES)
    corpus = open_corpus(config, 5, VOCABULARY, max_steps=40)
    sources = [corpus.sample(index).source for index in range(8 * 40)]
    assert set(sources[: 8 * 30]) == {0}
    assert Counter(sources[8 * 30 :]) == {0: 16, 1: 64}
    main, anneal = phase_reports(corpus, 8 * 40)
    assert (main.name, main.first_step, main.last_step) == ("main", 0, 30)
    assert (anneal.name, anneal.first_step, anneal.last_step) == ("anneal", 30, 40)
    assert main.drawn_tokens == {"a": 240 * 16, "b": 0}
    assert anneal.drawn_tokens == {"a": 16 * 16, "b": 64 * 16}
    assert anneal.epochs["b"] == 64 / corpus.order.windows[1]
    assert [report.drawn_tokens for report in source_reports(corpus, 8 * 40)] == [256 * 16, 64 * 16]
    planned = planned_phases(config, 40)
    assert [each["drawn_tokens"] for each in planned] == [main.drawn_tokens, anneal.drawn_tokens]
    assert [(each["first_step"], each["last_step"]) for each in planned] == [(0, 30), (30, 40)]
    whole, rank = corpus.micro_batches(31), corpus.micro_batches(31, [3, 1])  # as any layout cuts it
    assert rank.tokens.equal(whole.tokens[[3, 1]])
    static = open_corpus(data_config(cache, two_files), 5, VOCABULARY)
    assert corpus.fingerprint != static.fingerprint
    same = open_corpus(data_config(cache, two_files, mixture={"kind": "static"}), 5, VOCABULARY)
    assert same.fingerprint == static.fingerprint
    assert same.validation_fingerprint == corpus.validation_fingerprint


def test_a_step_may_stand_for_a_share(two_files: dict[str, Any], tmp_path: Path) -> None:
    def mixture(**keys: Any) -> Any:
        late = {"weights": {"a": 0}} | keys.pop("late")
        config = data_config(tmp_path, two_files, mixture={"kind": "phases", "phases": {"x": {}, "y": late}} | keys)
        chosen = config.chosen_mixture
        return chosen.follows_max_steps, list(chosen.build(config.trained_weights, 8, 100).phases(8 * 100))

    assert mixture(late={"start": 0.25}) == (True, mixture(late={"start_step": 25})[1])
    assert mixture(late={"start": 0.125}, total_steps=200) == (False, mixture(late={"start_step": 25})[1])
    config = data_config(tmp_path, two_files, mixture=TWO_PHASES)
    with pytest.raises(ConfigError, match=r"data\.mixture\.total_steps: a value must be given"):
        config.chosen_mixture.build(config.trained_weights, 8, None)


@pytest.mark.parametrize(
    ("phases", "key", "said"),
    [
        ({"x": {"start": 0.5}}, "data.mixture.phases", "exactly one must begin with the run, and none does"),
        ({"x": {}, "y": {"start_step": 0}}, "data.mixture.phases", "x, y do"),
        ({"x": {"weights": {"aa": 1}}}, "data.mixture.phases.x.weights.aa", "Did you mean 'a'?"),
        ({"x": {"weights": {"a": 0, "b": 0}}}, "data.mixture.phases.x.weights", "are all 0"),
        ({"x": {"weights": {"a": 1e-9}}}, "data.mixture.phases.x.weights.a", "smallest possible"),
        ({"x": {"weights": {"b": 1e9}}}, "data.sources.a.weight", "smallest possible"),
        (
            {"x": {}, "y": {"start": 0.5, "start_step": 3}},
            "data.mixture.phases.y.start_step",
            "is given in addition to start",
        ),
        ({"x": {"weights": {"a": 0}}}, "data.mixture.phases.x.weights.a", "is 0 in every phase"),
    ],
)
def test_phases_that_cannot_be(phases: Any, key: str, said: str, tmp_path: Path, two_files: dict[str, Any]) -> None:
    problems = check_data(data_config(tmp_path, two_files, mixture={"kind": "phases", "phases": phases}), VOCABULARY, 1)
    assert any(problem.key == key and said in problem.text for problem in problems), problems


def test_a_watched_source_is_scored_and_changes_nothing_else(
    cache: Path, two_files: dict[str, Any], tmp_path: Path
) -> None:
    file = write_jsonl(tmp_path / "c.jsonl", [words(50 + i, 30) for i in range(20)])
    watched = {"w": {"loader": "jsonl", "path": str(file), "role": "validation"}}
    plain = open_corpus(data_config(cache, two_files), 5, VOCABULARY)
    corpus = open_corpus(data_config(cache, watched | two_files), 5, VOCABULARY)
    assert corpus.fingerprint == plain.fingerprint
    assert corpus.validation_fingerprint == plain.validation_fingerprint  # of the mean, which holds no watched source
    own = corpus.source_fingerprints
    assert {name: own[name] for name in "ab"} == plain.source_fingerprints
    assert own.keys() == {"w", "a", "b"}
    for step in (0, 9):
        assert corpus.micro_batches(step).tokens.equal(plain.micro_batches(step).tokens)
    assert [corpus.origin(i) for i in range(9)] == [plain.origin(i) for i in range(9)]
    scored = Counter(source for source, _ in corpus._validation_windows)
    assert {corpus.names[source]: count for source, count in scored.items()} == {"w": 12, "a": 9, "b": 3}
    report = source_reports(corpus, 100)[0]
    assert (report.name, report.drawn_tokens, report.epochs, report.available_tokens) == ("w", 0, 0.0, 0)
    assert report.validation_tokens == sum(len(words(50 + i, 30)) + 1 for i in range(20))
    alone = open_corpus(
        data_config(cache, watched | two_files, validation={"fraction": 0.0, "sequences": 12}), 5, VOCABULARY
    )
    assert {corpus.names[source] for source, _ in alone._validation_windows} == {"w"}
    assert alone.source_fingerprints == {"w": own["w"]}
    assert alone.validation_fingerprint != corpus.validation_fingerprint


def test_a_source_of_weight_0_is_scored_as_ever_and_never_drawn(cache: Path, two_files: dict[str, Any]) -> None:
    validation = {"fraction": 0.2, "sequences": 12, "weights": {"a": 1.0, "b": 1.0}}
    with_it = open_corpus(data_config(cache, two_files, validation=validation), 5, VOCABULARY)
    none = two_files | {"b": two_files["b"] | {"weight": 0.0}}
    without = open_corpus(data_config(cache, none, validation=validation), 5, VOCABULARY)
    assert check_data(without.config, VOCABULARY, 1) == []
    assert {without.sample(index).source for index in range(300)} == {0}
    assert without._validation_windows == with_it._validation_windows
    assert {source for source, _ in without._validation_windows} == {0, 1}
    assert all(torch.equal(one.tokens, other.tokens) for one, other in _both(without, with_it))
    assert without.validation_fingerprint == with_it.validation_fingerprint
    assert without.fingerprint != with_it.fingerprint
    only = {"fraction": 0.2, "sequences": 6}
    alone = open_corpus(data_config(cache, {"a": two_files["a"]}, validation=only), 5, VOCABULARY)
    assert without.fingerprint == alone.fingerprint
    assert without.source_fingerprints["a"] == alone.source_fingerprints["a"]
    assert all(torch.equal(without.micro_batches(s).tokens, alone.micro_batches(s).tokens) for s in (0, 9))
    drawn = {report.name: report for report in source_reports(without, 40)}
    assert (drawn["b"].drawn_tokens, drawn["a"].achieved_share) == (0, 1.0)


def test_a_source_needs_a_window_only_if_drawn(cache: Path, two_files: dict[str, Any], tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "short.jsonl", ["a", "of", "to"])
    short = {"c": {"loader": "jsonl", "path": str(file), "weight": 0.0}}
    corpus = open_corpus(data_config(cache, two_files | short), 5, VOCABULARY)
    assert (corpus.order.windows[2], corpus.config.drawn) == (0, ("a", "b"))
    assert {corpus.sample(index).source for index in range(300)} == {0, 1}
    later = {"kind": "phases", "phases": {"x": {}, "y": {"start_step": 5, "weights": {"c": 1}}}}
    with pytest.raises(ConfigError, match=r"source 'c' has \d+"):
        open_corpus(data_config(cache, two_files | short, mixture=later), 5, VOCABULARY, max_steps=40)


def test_hashes_of_fully_drawn_data_equal_those_of_earlier_releases(cache: Path, two_files: dict[str, Any]) -> None:
    corpus = open_corpus(data_config(cache, two_files), 5, VOCABULARY)
    assert corpus.fingerprint == "b8a67142e0ce2d92d924813438410001"
    assert corpus.validation_fingerprint == "d0ca18ef19ee9c23a5dde7defa0d35fe"


def _both(one: Corpus, other: Corpus) -> Iterator[tuple[ValidationBatch, ValidationBatch]]:
    return zip(one.validation_batches(4), other.validation_batches(4), strict=True)


def test_invalid_validation_only_sources_are_rejected(tmp_path: Path, two_files: dict[str, Any]) -> None:
    watched = {name: source | {"role": "validation"} for name, source in two_files.items()}
    (problem,) = check_data(data_config(tmp_path, watched), VOCABULARY, 1)
    assert problem.key == "data.sources"
    one = two_files | {"b": watched["b"]}
    mixture = {"kind": "phases", "phases": {"x": {"weights": {"b": 1}}}}
    weights = {"fraction": 0.1, "weights": {"a": 1, "b": 2}}
    problems = check_data(data_config(tmp_path, one, mixture=mixture, validation=weights), VOCABULARY, 1)
    assert [problem.key for problem in problems] == ["data.mixture.phases.x.weights.b", "data.validation.weights"]


def test_a_run_that_ends_where_a_phase_begins_has_none_of_it() -> None:
    """Given in another order than they come in; of unlike lengths."""
    mixture = Phases(
        {"last": (25, {"a": 1.0, "b": 3.0}), "first": (0, {"a": 1.0, "b": 0.0}), "then": (10, {"a": 1, "b": 1})}
    )
    reached = {
        total: [(each.name, each.first, each.last) for each in mixture.phases(total)] for total in (10, 11, 25, 29)
    }
    assert reached == {
        10: [("first", 0, 10)],
        11: [("first", 0, 10), ("then", 10, 11)],
        25: [("first", 0, 10), ("then", 10, 25)],
        29: [("first", 0, 10), ("then", 10, 25), ("last", 25, 29)],
    }
    for total in range(30):
        drawn = [sum(each.drawn[source] for each in mixture.phases(total)) for source in (0, 1)]
        walked = [mixture.ordinal(index)[0] for index in range(total)]
        assert drawn == mixture.drawn(total) == [walked.count(0), walked.count(1)]
