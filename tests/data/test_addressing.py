"""Addresses against brute force: shares, interleaving, epochs, permutations."""

from collections import Counter
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_llm.base.keyed_hash import hash_words
from lightning_llm.data.mixing.addressing import (
    Address,
    SampleOrder,
    Shares,
    before,
    interleave,
    largest_remainder,
    merged,
    permute,
)

weights_strategy = st.lists(st.floats(0.02, 10), min_size=1, max_size=4)


def brute_force(order: SampleOrder, total: int) -> list[Address]:
    """Walk the indices one by one, with a counter per source: no division, no closed form."""
    drawn = [0] * len(order.names)
    left: list[list[int]] = [[] for _ in order.names]
    epochs = [-1] * len(order.names)
    walked = []
    credit = [0.0] * len(order.names)
    for _ in range(total):
        credit = [c + n for c, n in zip(credit, order.mixture.counts, strict=True)]
        s = max(range(len(credit)), key=lambda k: (credit[k], -k))
        credit[s] -= order.mixture.block
        if not left[s]:
            epochs[s] += 1
            left[s] = list(range(order.windows[s]))
        walked.append(Address(s, left[s].pop(0), epochs[s]))
        drawn[s] += 1
    assert drawn == order.drawn(total)
    return walked


@settings(max_examples=12, deadline=None)
@given(weights_strategy, st.data(), st.integers(0, 2**31))
def test_every_epoch_takes_each_window_once(weights: list[float], data: st.DataObject, seed: int) -> None:
    names = [f"s{i}" for i in range(len(weights))]
    windows = {name: data.draw(st.integers(1, 60)) for name in names}
    plain = SampleOrder(Shares(dict(zip(names, weights, strict=True))), windows, seed, shuffle=False)
    shuffled = SampleOrder(Shares(dict(zip(names, weights, strict=True))), windows, seed, shuffle=True)
    total = 2_300
    expected = brute_force(plain, total)
    assert [plain.locate(i) for i in range(total)] == expected
    got = [shuffled.locate(i) for i in range(total)]
    assert [(a.source, a.epoch) for a in got] == [(a.source, a.epoch) for a in expected]
    taken = Counter((a.source, a.epoch, a.window) for a in got)
    assert set(taken.values()) == {1}
    last = {a.source: a.epoch for a in got}
    for source, epoch in last.items():
        for whole in range(epoch):
            seen = {w for s, e, w in taken if (s, e) == (source, whole)}
            assert seen == set(range(windows[names[source]]))


@settings(max_examples=40, deadline=None)
@given(weights_strategy)
def test_shares_hold_in_every_prefix(weights: list[float]) -> None:
    names = [f"s{i}" for i in range(len(weights))]
    order = SampleOrder(Shares(dict(zip(names, weights, strict=True))), dict.fromkeys(names, 10), 0)
    drawn = [0] * len(names)
    for i in range(2_000):
        drawn[order.locate(i).source] += 1
        for s, weight in enumerate(weights):
            share = weight / sum(weights)
            # one sample for rounding, one per further source for the interleaving, and the block's own rounding
            assert abs(drawn[s] - share * (i + 1)) <= len(names) + (i + 1) / order.mixture.block


def test_a_tiny_weight_is_drawn() -> None:
    order = SampleOrder(Shares({"a": 1.0, "b": 0.001}), {"a": 10, "b": 10}, 0)
    assert order.drawn(1_000_000)[1] == pytest.approx(1_000_000 * 0.001 / 1.001, rel=0.01)
    with pytest.raises(ValueError, match="smallest"):
        SampleOrder(Shares({"a": 1.0, "b": 1e-6}), {"a": 10, "b": 10}, 0)


@pytest.mark.parametrize(
    ("weights", "total", "counts"),
    [([1, 1, 1], 1000, [334, 333, 333]), ([1, 1, 2], 2, [1, 0, 1]), ([3, 1], 3, [2, 1]), ([0, 1, 1], 3, [0, 2, 1])],
)
def test_ties_of_remainders_go_to_the_first(weights, total, counts) -> None:
    assert largest_remainder(weights, total) == counts


@pytest.mark.parametrize(
    ("weights", "block", "counts"),
    [
        ([1.0], 1_000, [1_000]),
        ([0.99, 0.01], 1_000, [990, 10]),
        ([0.9901, 0.0099], 10_000, [9_901, 99]),
        ([0.999, 0.001], 10_000, [9_990, 10]),
        ([0.9991, 0.0009], 100_000, [99_910, 90]),
        ([0.9999, 0.0001, 0.0], 100_000, [99_990, 10, 0]),
    ],
)
def test_a_block_has_ten_samples_of_its_smallest_source(weights, block, counts) -> None:
    """Draws depend on the block's size: another size would be other data."""
    shares = Shares({f"s{i}": weight for i, weight in enumerate(weights)})
    assert (shares.block, shares.counts) == (block, counts)


@given(weights_strategy, st.integers(1, 500))
def test_largest_remainder_is_within_one(weights: list[float], total: int) -> None:
    counts = largest_remainder(weights, total)
    assert sum(counts) == total
    assert all(abs(c - total * w / sum(weights)) < 1 + 1e-9 for c, w in zip(counts, weights, strict=True))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any))
def test_interleave_uses_every_place(counts: list[int]) -> None:
    pattern, before = interleave(counts)
    assert [pattern.count(s) for s in range(len(counts))] == counts
    assert all(before[p] == pattern[:p].count(s) for p, s in enumerate(pattern))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3_000), st.integers(0, 2**32 - 1))
def test_permute_is_a_bijection(n: int, seed: int) -> None:
    keys = [hash_words(r, seed=seed) for r in range(8)]
    assert sorted(permute(i, n, keys) for i in range(n)) == list(range(n))


def test_permute_reaches_every_order_evenly() -> None:
    trials, n = 12_000, 4
    counts = Counter(
        tuple(permute(i, n, [hash_words(r, seed=seed) for r in range(8)]) for i in range(n)) for seed in range(trials)
    )
    assert set(counts) == set(permutations(range(n)))
    expected = trials / 24
    chi_square = sum((c - expected) ** 2 / expected for c in counts.values())
    assert chi_square < 49.7  # 23 degrees of freedom, p = 0.001


def test_first_place_is_uniform_over_a_large_odd_domain() -> None:
    n, trials = 1_000_003, 20_000
    bins = Counter(permute(7, n, [hash_words(r, seed=seed) for r in range(8)]) * 20 // n for seed in range(trials))
    expected = trials / 20
    assert sum((bins[b] - expected) ** 2 / expected for b in range(20)) < 43.8  # 19 degrees of freedom, p = 0.001


def test_order_depends_on_seed_epoch_and_name_alone() -> None:
    def windows_of(order: SampleOrder, name: str, count: int) -> list[int]:
        source, found, i = order.names.index(name), [], 0
        while len(found) < count:
            address = order.locate(i)
            found += [address.window] if address.source == source else []
            i += 1
        return found

    alone = windows_of(SampleOrder(Shares({"a": 1.0}), {"a": 50}, 3), "a", 100)
    mixed = windows_of(SampleOrder(Shares({"z": 5.0, "a": 1.0}), {"z": 9, "a": 50}, 3), "a", 100)
    assert alone == mixed
    assert alone[:50] != alone[50:]
    assert alone != windows_of(SampleOrder(Shares({"a": 1.0}), {"a": 50}, 4), "a", 100)


def test_known_answers() -> None:
    """A change here changes every run's data: raise the cache's version and say so in the change log."""
    order = SampleOrder(Shares({"code": 0.7, "prose": 0.3}), {"code": 11_000, "prose": 2_500}, 1)
    got = [(a.source, a.window, a.epoch) for a in map(order.locate, (0, 1, 2, 999, 123_456_789))]
    assert got == [(0, 5966, 0), (1, 276, 0), (0, 10197, 0), (0, 993, 0), (0, 1144, 7856)]


@given(
    ranges=st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda at: (at[0], at[0] + at[1])), max_size=6
    ),
    weights=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_sequences_after_an_excluded_one_move_up(ranges, weights):
    """Against a list of the whole order from which the samples are struck."""
    names = [f"source{s}" for s in range(len(weights))]
    shares, windows = Shares(dict(zip(names, map(float, weights), strict=True))), dict.fromkeys(names, 7)
    whole, skipped = SampleOrder(shares, windows, 3), merged(ranges)
    order = SampleOrder(shares, windows, 3, skipped=skipped)
    left = [index for index in range(200) if not any(first <= index <= last for first, last in ranges)][:60]
    assert [order.locate(position) for position in range(60)] == [whole.locate(index) for index in left]
    counts = [
        [whole.locate(index).source for index in left[:total]].count(s)
        for total in (0, 7, 60)
        for s in range(len(names))
    ]
    assert [count for total in (0, 7, 60) for count in order.drawn(total)] == counts
    for end in (0, 5, 30):
        struck = {index for first, last in before(end, skipped) for index in range(first, last + 1)}
        assert struck == {index for index in range(end) if any(first <= index <= last for first, last in ranges)}


def test_ranges_that_overlap_or_touch_are_one() -> None:
    assert merged([(5, 6), (0, 3), (4, 4), (9, 12), (10, 11), (8, 9)]) == ((0, 6), (8, 12))
    assert before(10, ((0, 6), (8, 12), (20, 21))) == ((0, 6), (8, 9))
    assert before(8, ((0, 6), (8, 12))) == ((0, 6),)
