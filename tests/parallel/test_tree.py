"""Sums in the order of the tree, against a plain recursion over single numbers."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.parallel.tree import TreeSum, sum_rows


def by_definition(values: list[torch.Tensor]) -> torch.Tensor:
    while len(values) > 1:
        pairs = [values[i] + values[i + 1] for i in range(0, len(values) - 1, 2)]
        values = [*pairs, *values[2 * len(pairs) :]]
    return values[0]


def leaves(count: int) -> torch.Tensor:
    return torch.randn(count, 7, generator=torch.Generator().manual_seed(count)) * 10.0 ** torch.arange(-3, 4)


@given(st.integers(1, 40))
def test_rows_are_summed_by_the_tree(count):
    rows = leaves(count)
    assert torch.equal(sum_rows(rows.clone()), by_definition(list(rows)))


@given(st.integers(1, 40))
def test_a_counter_of_pairs_sums_by_the_tree(count):
    """As gradients come: an odd leaf is added to the even one before it, and the last may be alone."""
    rows = leaves(count)
    counter, running = TreeSum(), None
    for micro_batch, leaf in enumerate(rows):
        running = leaf.clone() if running is None else running + leaf
        if micro_batch == count - 1:
            counter.close([running])
        elif micro_batch % 2:
            counter.push([running], level=1)
            running = None
    assert torch.equal(running, by_definition(list(rows)))


def test_the_order_matters_so_that_these_tests_can_fail():
    rows = leaves(16)
    chain = rows[0].clone()
    for row in rows[1:]:
        chain += row
    assert not torch.equal(chain, sum_rows(rows.clone()))
