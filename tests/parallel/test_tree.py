"""Sums in the order of the tree, against a plain recursion over single numbers."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_llm.parallel import tree
from lightning_llm.parallel.tree import Subtrees, TreeSum, sum_rows, tree_reduce_scatter


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


class FakeGroup(SimpleNamespace):
    """Ranks of a process group, `ranks` in order."""

    def size(self):
        return len(self.ranks)


def reduce_scattered(tensors, per_node, monkeypatch):
    """Return the part of each rank, machines having `per_node` ranks, by collectives between lists in this process."""
    world = len(tensors)
    begun = []

    def all_to_all(received, sent, group, async_op):
        begun.append((received, sent.clone(), group))

    monkeypatch.setattr(tree, "dist", SimpleNamespace(all_to_all_single=all_to_all))
    works, parts = [], {}
    for rank, tensor in enumerate(tensors):
        node, place = divmod(rank, per_node)
        within = FakeGroup(ranks=[node * per_node + each for each in range(per_node)])
        between = FakeGroup(ranks=list(range(place, world, per_node)))
        works.append(tree_reduce_scatter(tensor, FakeGroup(ranks=list(range(world))), Subtrees(within, between)))
    while len(parts) < world:
        for rank, work in enumerate(works):
            try:
                next(work)
            except StopIteration as end:
                parts[rank] = end.value
        if begun:
            for rank, (received, _, group) in enumerate(begun):
                place = group.ranks.index(rank)
                chunks = [begun[peer][1].chunk(group.size())[place] for peer in group.ranks]
                received.copy_(torch.cat(chunks))
            begun.clear()
    return [parts[rank] for rank in range(world)]


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (3, 2), (2, 3), (3, 4), (4, 2), (1, 4), (5, 1), (2, 8)])
def test_sums_in_two_stages_are_of_each_ranks_own_part_however_many_machines(nodes, per_node, monkeypatch):
    """As many machines as ranks of each would hide a swap of the two; the bits are the tree's where 2^k share one."""
    world, size = nodes * per_node, 3
    rows = torch.randn(world, world * size, generator=torch.Generator().manual_seed(world))
    parts = reduce_scattered([row.clone() for row in rows], per_node, monkeypatch)
    for rank, part in enumerate(parts):
        own = [row[rank * size : (rank + 1) * size] for row in rows]
        if per_node & (per_node - 1) == 0:
            assert torch.equal(part, by_definition(own))
        torch.testing.assert_close(part, torch.stack(own).double().sum(0).float())
