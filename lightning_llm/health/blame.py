"""Whose numbers are wrong: by who sent what, and of sums by leaving ranks out."""

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

from lightning_llm.health.collectives import WrongValues


def blamed_pairs(found: Iterable[WrongValues], hosts: Sequence[str]) -> str:
    """Return who is at fault where each number's sender is known: a rank that all its peers blame, or pairs.

    `hosts`: the machine of each rank.
    """
    pairs = {(source, each.receiver) for each in found for source in each.sources}
    everyone = range(len(hosts))
    sending, receiving = (
        [rank for rank in everyone if len(hosts) > 2 and {each[end] for each in pairs if each[1 - end] == rank}
         >= set(everyone) - {rank}]
        for end in (1, 0)
    )  # fmt: skip
    named = [f"what rank {rank} ({hosts[rank]}) sends" for rank in sending]
    named += [f"what rank {rank} ({hosts[rank]}) receives" for rank in receiving]
    left = sorted((a, b) for a, b in pairs if a not in sending and b not in receiving)
    named += [f"what goes from rank {a} ({hosts[a]}) to rank {b} ({hosts[b]})" for a, b in left]
    return f"wrong is {', '.join(named)}"


def blamed_ranks(world: int, are_right: Callable[[Sequence[Sequence[int]]], list[bool]]) -> tuple[list[int], list[int]]:
    """Return the ranks whose part of a sum is wrong, and those of which one has it that cannot be told from another.

    Groups of ranks sum without the others: a group whose sum is right clears its ranks, any other is halved; what is
    left is paired with a cleared rank. Both lists are empty where every smaller group is right.

    Args:
        world: how many ranks there are.
        are_right: has groups without a common rank sum each by itself, and says which sums came out right.
    """
    cleared: set[int] = set()
    suspects: list[int] = []
    groups = [list(range(world))]
    while groups:
        halves = []
        for group, right in zip(groups, are_right(groups), strict=True):
            middle = (len(group) + 1) // 2
            if right:
                cleared |= set(group)
            elif len(group) == 2:
                suspects += group
            else:
                halves += [group[:middle], group[middle:]]
        suspects += [group[0] for group in halves if len(group) == 1]
        groups = [group for group in halves if len(group) > 1]
    suspects.sort()
    if not cleared and len(suspects) > 2:  # of three ranks, one of them wrong, there is a pair that is right
        cleared = set(next((pair for pair in combinations(suspects[:3], 2) if are_right([pair])[0]), ()))
    if not cleared:
        return [], suspects
    reference = min(cleared)
    return [each for each in suspects if each not in cleared and not are_right([sorted((reference, each))])[0]], []
