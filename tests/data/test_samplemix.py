"""SampleMix: weights and copies against closed forms, counts against chance, streams token by token, refusals."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats

from lightning_llm.__main__ import main
from lightning_llm.base.errors import ConfigError
from lightning_llm.base.keyed_hash import hash_words, name_word
from lightning_llm.data.check import check_data
from lightning_llm.data.mixing.scored import (
    document_draws,
    hashed_words,
    in_rounds,
    realised_copies,
    sampling_weights,
)
from lightning_llm.data.opening import ChosenStream, open_corpus
from lightning_llm.data.report import source_reports
from lightning_llm.data.scoring import LengthEntropy, TfidfKMeans, read_scores, scores_problems, write_scores
from lightning_llm.data.sources.source import Source, content_key
from tests.data.corpus_files import data_config, words, write_jsonl
from tests.run_metrics import curve


def test_weights_are_the_softmax():
    generator = np.random.default_rng(0)
    quality, diversity = generator.random(50), generator.random(50)
    powers = [np.exp((0.8 * d + 0.2 * q) / 0.2) for q, d in zip(quality, diversity, strict=True)]
    np.testing.assert_allclose(
        sampling_weights(quality, diversity, 0.8, 0.2), np.array(powers) / sum(powers), rtol=1e-12
    )
    np.testing.assert_allclose(sampling_weights(quality, diversity, 0.0, 1e3), np.full(50, 0.02), rtol=1e-3)
    assert sampling_weights(quality, diversity, 1.0, 1e-3).argmax() == diversity.argmax()


def test_draws_are_the_keyed_hash_and_uniform():
    keys = np.array([content_key(str(i % 700)) for i in range(1000)], np.uint64)
    draws = document_draws("code", keys)
    for index in (0, 5, 705):  # 705 has the key of 5, a second time
        key, times = int(keys[index]), int(index >= 700)
        assert draws[index] * 2**32 == hash_words(key & 0xFFFFFFFF, key >> 32, times, seed=name_word("code"))
    assert draws[5] != draws[705]
    assert hashed_words(np.array([1], np.uint32), seed=9)[0] == hash_words(1, seed=9)
    assert stats.kstest(draws, "uniform").pvalue > 0.001
    assert (draws != document_draws("prose", keys)).all()


def test_copies_meet_their_expectation_and_are_never_off_by_one():
    generator = np.random.default_rng(1)
    keys = np.array([content_key(str(i)) for i in range(3000)], np.uint64)
    expected = 3000 * sampling_weights(generator.random(3000), generator.random(3000), 0.8, 0.2)
    copies = realised_copies(expected, document_draws("s", keys))
    assert (np.abs(copies - expected) < 1).all()
    rest = expected - np.floor(expected)
    bins = np.minimum((rest * 10).astype(int), 9)  # by chance of one more
    more = copies - np.floor(expected)
    seen, chance = np.bincount(bins, more), np.bincount(bins, rest)
    spread = np.bincount(bins, rest * (1 - rest))
    assert stats.chi2.sf(((seen - chance) ** 2 / spread).sum(), 10) > 0.001
    assert abs(copies.sum() - 3000) < 4 * spread.sum() ** 0.5


def test_copies_lie_in_rounds():
    assert in_rounds(np.array([2, 0, 1, 3])).tolist() == [0, 2, 3, 0, 3, 3]
    assert in_rounds(np.zeros(3, int)).tolist() == []
    copies = np.random.default_rng(0).poisson(1.5, 400)
    copies[7] = 30
    plain = [number for made in range(30) for number in np.flatnonzero(copies > made)]
    assert in_rounds(copies).tolist() == plain


def test_rounds_take_time_and_memory_by_copies_and_not_by_rounds_times_documents():
    copies = np.ones(50_000, int)
    copies[[3, 9]] = 2_000_000, 1_000_000
    tracemalloc.start()
    order = in_rounds(copies)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(order) == copies.sum()
    assert order[50_000:50_004].tolist() == [3, 9, 3, 9]
    assert peak < 10 * order.nbytes


@pytest.fixture(scope="module")
def scored(two_files, cache, tmp_path_factory):
    """Scores of the two files: the i-th document of `a` has quality i / 40, one of `b` none; and diversity 1 in `b`."""
    file, rows = tmp_path_factory.mktemp("scores") / "scores.parquet", {}
    config = data_config(cache, two_files)
    for name in ("a", "b"):
        rows[name] = [document.key for document in Source(name, config.sources[name]).documents()]
    count_a, count_b = len(rows["a"]), len(rows["b"])
    columns = {
        "source": ["a"] * count_a + ["b"] * count_b,
        "key": np.array(rows["a"] + rows["b"], np.uint64),
        "text_bytes": np.ones(count_a + count_b, np.int64),
        "quality": np.concatenate([np.arange(count_a) / count_a, np.zeros(count_b)]),
        "diversity": np.concatenate([np.zeros(count_a), np.ones(count_b)]),
        "cluster": np.array([0] * count_a + [1] * count_b, np.int32),
    }
    write_scores(file, columns, {})
    return file


def mixed(cache, two_files, file, **keys):
    sources = {name: {**source, "weight": 1.0} for name, source in two_files.items()}
    mixture = {"kind": "samplemix", "scores": str(file), "ratio": 3.0, **keys}
    return data_config(cache, sources, mixture=mixture)


def test_a_stream_holds_the_documents_as_often_as_their_scores_say(two_files, cache, scored):
    plain = open_corpus(data_config(cache, two_files), 0, 300)
    corpus = open_corpus(mixed(cache, two_files, scored, alpha=0.5, tau=0.5), 0, 300)
    end, pieces = corpus.tokenizer.end_of_document, {}
    for name, stream in zip(corpus.trained, plain.train, strict=True):
        ends = np.append(stream.starts[1:], len(stream.tokens))
        pieces[name] = [stream.tokens[a:b].tolist() for a, b in zip(stream.starts, ends, strict=True)]
    rows = read_scores(scored, "k")
    held = {"a": [], "b": []}  # of each training document: score
    for name in held:
        source = Source(name, corpus.config.sources[name])
        kept = {tuple(piece) for piece in pieces[name]}
        for document in source.documents():
            if (*corpus.tokenizer.encode_batch([document.text])[0].tolist(), end) in kept:
                at = rows[name].columns["key"].tolist().index(document.key)
                held[name].append(
                    (document.key, 0.5 * rows[name].columns["quality"][at] + 0.5 * rows[name].columns["diversity"][at])
                )
    total = sum(len(each) for each in held.values())
    powers = {name: np.exp(np.array([score for _, score in each]) / 0.5) for name, each in held.items()}
    whole = sum(each.sum() for each in powers.values())
    for index, name in enumerate(corpus.trained):
        expected = 3.0 * total * powers[name] / whole
        keys = [key for key, _ in held[name]]
        draws = [hash_words(key & 0xFFFFFFFF, key >> 32, 0, seed=name_word(name)) / 2**32 for key in keys]
        copies = [int(e) + (u < e - int(e)) for e, u in zip(expected, draws, strict=True)]
        wanted = [
            token for turn in range(max(copies)) for i, n in enumerate(copies) if n > turn for token in pieces[name][i]
        ]
        stream = corpus.train[index]
        assert isinstance(stream, ChosenStream)
        assert stream.tokens[0 : len(stream.tokens)].tolist() == wanted
        assert [stream.tokens[i : i + 17].tolist() for i in range(0, 90, 7)] == [
            wanted[i : i + 17] for i in range(0, 90, 7)
        ]
        assert corpus.chosen[name]["copies"] == sum(copies)
        assert corpus.chosen[name]["expected"] == pytest.approx(expected.sum())
        assert corpus.chosen[name]["dropped"] == copies.count(0)
    shares = [each.share for each in source_reports(corpus, 1000)]
    windows = np.array(corpus.order.windows)
    np.testing.assert_allclose(shares, windows / windows.sum())
    achieved = [each.achieved_share for each in source_reports(corpus, 1000)]
    np.testing.assert_allclose(achieved, shares, atol=1e-3)
    clusters = {key: share for each in corpus.chosen.values() for key, share in each["clusters"].items()}
    assert sum(clusters.values()) == pytest.approx(1)


def test_scores_change_the_hash_of_training_data_but_not_of_validation(two_files, cache, scored):
    plain = open_corpus(
        data_config(cache, two_files, validation={"fraction": 0.2, "weights": {"a": 0.5, "b": 0.5}}), 0, 300
    )
    found = {}
    for alpha in (0.2, 0.9):
        config = mixed(cache, two_files, scored, alpha=alpha)
        config = config.model_copy(update={"validation": plain.config.validation})
        corpus = open_corpus(config, 0, 300)
        assert corpus.validation_fingerprint == plain.validation_fingerprint
        assert corpus.fingerprint == open_corpus(config, 5, 300).fingerprint
        found[alpha] = corpus
    assert len({found[0.2].fingerprint, found[0.9].fingerprint, plain.fingerprint}) == 3
    shares = {alpha: corpus.mix_shares[1] for alpha, corpus in found.items()}
    assert shares[0.9] > shares[0.2], "the diverse source has more where diversity counts more"


def test_refusals(two_files, cache, scored, tmp_path):
    def said(config) -> str:
        return "\n".join(map(str, check_data(config, 300, 1)))

    assert "data.mixture.scores: /nowhere.parquet does not exist" in said(mixed(cache, two_files, "/nowhere.parquet"))
    weighed = data_config(cache, two_files, mixture={"kind": "samplemix", "scores": str(scored)})
    assert "data.sources.a.weight: is 3, but scores decide here" in said(weighed)
    assert "data.mixture.ratio: is 1e+09: must be at most 1000" in said(mixed(cache, two_files, scored, ratio=1e9))
    bounded = mixed(cache, two_files, scored).model_copy(update={"max_tokens": 320})
    assert "data.max_tokens: limits sequences in stored order, but data.mixture.kind=samplemix chooses" in said(bounded)
    grown = {
        **two_files,
        "b": {**two_files["b"], "path": str(write_jsonl(tmp_path / "b.jsonl", [words(i, 30) for i in range(9)]))},
    }
    with pytest.raises(ConfigError, match=r"no scores of \d of \d documents of source 'b', first of training document"):
        open_corpus(mixed(cache, grown, scored), 0, 300)
    other = tmp_path / "other.parquet"
    other.write_text("no table")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_corpus(mixed(cache, two_files, other), 0, 300)


def test_problems_of_a_table_are_reported_by_column_and_row(scored, tmp_path):
    whole = pq.read_table(scored)

    def said(**columns) -> str:
        table = whole
        for name, values in columns.items():
            table = table.set_column(table.column_names.index(name), name, pa.array(values))
        pq.write_table(table, tmp_path / "t.parquet")
        return "\n".join(map(str, scores_problems("k", tmp_path / "t.parquet")))

    def but(name, **rows):
        values = whole[name].to_pylist()
        for row, value in rows.items():
            values[int(row[1:])] = value
        return values

    assert said() == ""
    assert said(quality=whole["quality"].cast("float32"), cluster=whole["cluster"].cast("int64")) == ""
    assert "column key contains string: must contain whole numbers from 0 on (uint64)" in said(
        key=list(map(str, whole["key"].to_pylist()))
    )
    assert "column key must contain whole numbers" in said(key=[-1, *range(len(whole) - 1)])
    assert "column source contains int64: must contain text" in said(source=list(range(len(whole))))
    both = said(source=but("source", r4=None), quality=but("quality", r5=None, r9=None))
    assert "column source is null in 1 of 65 rows, first in row 4" in both
    assert "column quality is null in 2 of 65 rows, first in row 5" in both
    assert "column quality is not a finite number in 1 of 65 rows, first in row 6 (nan)" in said(
        quality=but("quality", r6=float("nan"))
    )
    assert "column diversity is outside [0, 1] in 2 of 65 rows, first in row 1 (1.5)" in said(
        diversity=but("diversity", r1=1.5, r3=-2.0)
    )
    key = whole["key"][2].as_py()
    assert "1 document has two rows (one source and key) that differ, first rows 2 and 5" in said(
        key=pa.array(but("key", r5=key), pa.uint64())
    )


def test_scoring_nothing_is_refused(tmp_path, capsys):
    for text, said in (
        ("", "contain only documents without text"),
        ("!?!", "cannot score these 1 documents: empty vocab"),
    ):
        file = write_jsonl(tmp_path / "d.jsonl", [text])
        words = ["data=jsonl", f"data.sources.jsonl.path={file}", "--output", str(tmp_path / "s.parquet")]
        assert main(["prepare", *words, "--score", "diversity=tfidf_kmeans"]) == 2
        assert said in capsys.readouterr().err
    file = write_jsonl(tmp_path / "d.jsonl", ["a text"])
    for asked, said in (
        (["--score", "quality=length_entropy", "--output", str(tmp_path)], "is a folder. Give a file in it"),
        (["--score", "quality=length_entropy", "--output", f"{file}/s"], "cannot be written (Not a directory)"),
        (["--output", str(tmp_path / "s.parquet")], "--output: has no effect without --score"),
        (["--score", "quality=length_entropy", "quality=length_entropy"], "quality is given twice"),
        (["--score", "diversity.clusters=3"], "diversity has keys but no scorer"),
    ):
        assert main(["prepare", "data=jsonl", f"data.sources.jsonl.path={file}", *asked]) == 2
        assert said in capsys.readouterr().err


def test_a_fault_of_a_scorer_is_not_put_on_the_documents(tmp_path, monkeypatch):
    def score(self: LengthEntropy, texts: list[str]) -> None:
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(LengthEntropy, "score", score)
    file = write_jsonl(tmp_path / "d.jsonl", ["a text"])
    words = ["data=jsonl", f"data.sources.jsonl.path={file}", "--output", str(tmp_path / "s.parquet")]
    with pytest.raises(ValueError, match="broadcast"):
        main(["prepare", *words, "--score", "quality=length_entropy"])


def test_diversity_holds_no_dense_matrix():
    words = [f"w{i}" for i in range(4000)]
    generator = np.random.default_rng(0)
    texts = [" ".join(generator.choice(words, 12)) for _ in range(3000)]
    scorer = TfidfKMeans(clusters=2)
    scorer.score(texts[:50])  # imports are not of the documents
    tracemalloc.start()
    scorer.score(texts)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3000 * 4000 * 8 / 3


def test_scorers_measure_what_they_document():
    quality, clusters = LengthEntropy().score(["aaaaaaaaaaaa", "the quick brown fox jumps over a lazy dog " * 9, "ab"])
    assert clusters is None
    assert quality.argmax() == 1
    assert quality.min() >= 0
    alike = ["cat dog cat dog bird"] * 6
    unlike = [f"stone river w{i} x{i}" for i in range(6)]
    diversity, clusters = TfidfKMeans(clusters=2).score(alike + unlike)
    assert len(set(clusters[:6])) == len(set(clusters[6:])) == 1
    assert diversity.tolist() == [0] * 6 + [1] * 6, "the loose cluster is the diverse one"
    assert (diversity == TfidfKMeans(clusters=2).score(alike + unlike)[0]).all()


def test_a_run_draws_the_prepared_scores_and_resumes_to_the_bit(small_run, tmp_path, capsys):
    scores = tmp_path / "scores.parquet"
    base = [word for word in small_run(tmp_path) if not word.startswith(("run.", "checkpoint", "callbacks", "logger"))]
    chosen = ["--score", "quality=length_entropy", "diversity=tfidf_kmeans", "diversity.clusters=3"]
    assert main(["prepare", *base, *chosen, "--output", str(scores)]) == 0
    assert "120" in capsys.readouterr().out
    assert main(["prepare", *base, "--score", "quality=lenght_entropy", "diversity.k=3"]) == 2
    told = capsys.readouterr().err
    assert "Did you mean 'length_entropy'" in told
    mix = f"+data.mixture={{kind: samplemix, scores: {scores}, ratio: 0.5}}"

    def steps(name, *more):
        assert (
            main(["train", *small_run(tmp_path, mix, "schedule.total_steps=6", f"run.dir={tmp_path / name}", *more)])
            == 0
        )
        return [each for each in curve(tmp_path / name) if each[2] is not None]

    whole = steps("whole")
    told = capsys.readouterr().out
    assert "copies jsonl: " in told
    assert "left out" in told
    assert len(whole) == 6
    steps("parts", "trainer.max_steps=4")
    assert steps("parts", "resume=auto") == whole


def test_an_integer_expectation_is_met_for_every_draw():
    expected, draws = np.array([2.0, 0.0, 1.5, 1.5, 3.0]), np.array([0.0, 0.0, 0.5, 0.499, 0.999])
    assert realised_copies(expected, draws).tolist() == [2, 0, 1, 2, 3]
