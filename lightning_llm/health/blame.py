"""Whose numbers are wrong: by who sent what, and of sums by leaving ranks out."""

from collections.abc import Callable, Iterable, Sequence

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


def blamed_ranks(
    rank: int, world: int, is_right: Callable[[Sequence[int]], bool], share: Callable[[bool], list[bool]]
) -> tuple[list[int], list[int]]:
    """Return the ranks whose part of a sum is wrong, and those of which one has it that cannot be told from another.

    Groups of ranks sum without the others: a group whose sum is right clears its ranks, any other is halved; what is
    left is paired with a cleared rank. Both lists are empty where every smaller group is right. Collective.

    Args:
        rank: this one.
        world: how many there are.
        is_right: sums among the ranks that it is given, which call it together, and says whether that came out right.
        share: gives every rank's answer.
    """
    cleared: set[int] = set()
    suspects: list[int] = []
    groups = [list(range(world))]
    while groups:
        mine = next((group for group in groups if rank in group), None)
        right = share(is_right(mine) if mine else True)
        halves = []
        for group in groups:
            if all(right[each] for each in group):
                cleared |= set(group)
            elif len(group) == 2:
                suspects += group
            else:
                middle = len(group) // 2 + len(group) % 2
                halves += [group[:middle], group[middle:]]
        suspects += [group[0] for group in halves if len(group) == 1]
        groups = [group for group in halves if len(group) > 1]
    if not cleared:
        return [], sorted(suspects)
    reference, named = min(cleared), []
    for suspect in sorted(suspects):
        pair = [reference, suspect]
        right = share(is_right(pair) if rank in pair else True)
        if not all(right[each] for each in pair):
            named.append(suspect)
    return named, []
