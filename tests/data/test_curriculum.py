"""A curriculum: the same windows in the order of a score, for every length of the run; rejected scores."""

import pickle
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from lightning_llm.config.schema.data import Pace
from lightning_llm.data.mixing.addressing import SampleOrder, Shares
from lightning_llm.data.opening import open_corpus
from lightning_llm.data.scoring import write_scores
from lightning_llm.data.sources.source import Source
from tests.data.corpus_files import data_config


@pytest.mark.parametrize("total", [60, 137, 400])
@pytest.mark.parametrize("blocks", [1, 4, 1000])
def test_windows_are_those_of_the_shuffled_run_in_order(total, blocks):
    """Against the shuffled order, sorted epoch by epoch: the same windows, rising from block to block."""
    windows, shares = {"a": 60, "b": 25}, Shares({"a": 3.0, "b": 1.0})
    plain = SampleOrder(shares, windows, 7)
    paced = SampleOrder(shares, windows, 7, pace=Pace(blocks), total=total)
    assert [pickle.loads(pickle.dumps(paced)).locate(i) for i in range(9)] == [paced.locate(i) for i in range(9)]
    one, other = ([order.locate(i) for i in range(total)] for order in (plain, paced))
    assert [(a.source, a.epoch) for a in one] == [(a.source, a.epoch) for a in other]
    for key in {(a.source, a.epoch) for a in one}:
        before, after = ([a.window for a in each if (a.source, a.epoch) == key] for each in (one, other))
        assert Counter(before) == Counter(after)
        count = len(after)
        cut = [[w for i, w in enumerate(after) if i * blocks // count == block] for block in range(blocks)]
        ends = [(min(each), max(each)) for each in cut if each]
        assert all(high < low for (_, high), (low, _) in pairwise(ends))
        if blocks == 1 and count > 10:
            assert after != sorted(after)
        if blocks == 1000:
            assert after == sorted(after)
    assert paced.locate(total + 50).window < 60  # beyond the run


def test_samples_that_are_left_out_move_no_other():
    """A run that went back trains on the samples of a run that excluded them from the start."""
    windows, shares, skipped = {"a": 60, "b": 25}, Shares({"a": 3.0, "b": 1.0}), (50, 57)
    whole, without = (
        SampleOrder(shares, windows, 7, pace=Pace(4), total=137, skipped=each) for each in ((), (skipped,))
    )
    order, taken = [whole.locate(i) for i in range(137)], [without.locate(i) for i in range(137)]
    assert taken[:129] == [*order[:50], *order[58:]]
    seen = [*order[50:58], *taken]
    assert len(set(seen)) == len(seen)


def test_a_corpus_goes_from_short_documents_to_long_ones(two_files, cache, tmp_path):
    config = data_config(cache, two_files)
    rows = {name: list(Source(name, config.sources[name]).documents()) for name in two_files}
    documents = [document for each in rows.values() for document in each]
    columns = {
        "source": [name for name, each in rows.items() for _ in each],
        "key": np.array([document.key for document in documents], np.uint64),
        "text_bytes": np.array([document.text_bytes for document in documents]),
        **dict.fromkeys(("quality", "diversity", "cluster"), np.zeros(len(documents))),
    }
    write_scores(tmp_path / "scores.parquet", columns, {})

    def opened(order: str):
        mixture = {"kind": "curriculum", "scores": str(tmp_path / "scores.parquet"), "order": order, "blocks": 1000}
        return open_corpus(data_config(cache, two_files, mixture=mixture), 3, 300, max_steps=20)

    rising, falling, shuffled = (opened(order) for order in ("ascending", "descending", "shuffled"))
    lengths = np.diff(rising.train[0].starts)
    assert (np.diff(lengths) >= 0).all()
    assert len(set(lengths.tolist())) > 3
    assert len(rising.train[0].tokens) == len(open_corpus(config, 0, 300).train[0].tokens)

    def drawn(corpus) -> Counter:
        return Counter((s.source, s.epoch, s.window) for s in (corpus.sample(i) for i in range(20 * 8)))

    assert drawn(rising) == drawn(shuffled) == drawn(falling)
    assert rising.train[0].digest == shuffled.train[0].digest == falling.train[0].digest
    of_b = [
        [each.window for each in map(corpus.sample, range(20 * 8)) if each.source == 1 and each.epoch == 0]
        for corpus in (rising, falling)
    ]
    assert of_b[1] == of_b[0][::-1]
    assert len({each.fingerprint for each in (rising, falling, shuffled)}) == 3
    first, last = (
        [rising.sample(i).window for i in span if rising.sample(i).source == 1] for span in (range(16), range(20, 34))
    )
    assert max(first) < min(last)
