"""Groups of ranks, one per world size, shared by all tests here."""

from collections.abc import Callable, Iterator

import pytest
from rank_group import RankGroup


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankGroup]]:
    """Return the group of a world size; started when first called."""
    groups: dict[int, RankGroup] = {}

    def group(world: int) -> RankGroup:
        return groups.setdefault(world, RankGroup(world))

    yield group
    for each in groups.values():
        each.close()
