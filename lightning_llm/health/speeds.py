"""What each rank's own device takes for the same work, in rounds that all ranks make together."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_llm.health.extent import Extent
from lightning_llm.health.memory import Copy
from lightning_llm.health.products import SquareProduct, formats_of
from lightning_llm.health.ranks import Ranks
from lightning_llm.health.timer import Timer

COPY = "memory copy"
WARM_UP_ROUNDS = 2


def gemm(number_format: str) -> str:
    """Return what GEMMs in `number_format` are called among kinds of work."""
    return f"{number_format} GEMM"


def shares_cores(ranks: Ranks, device: torch.device) -> bool:
    """Return whether ranks of any machine have more threads than cores: one's work is another's wait. Collective."""
    here = device.type != "cuda" and ranks.local_world * torch.get_num_threads() > (os.cpu_count() or 1)
    return any(ranks.share(here))


def device_seconds(
    ranks: Ranks, device: torch.device, timer: Timer, extent: Extent, rounds: int, wrong: list[str]
) -> list[dict[str, list[float]]]:
    """Return by rank and kind of work the seconds of each round; add to `wrong` what GEMMs got wrong. Collective.

    All ranks work at once; those that share cores one after the other, in an order that turns by a place each round, so
    that no rank has the cores when others leave them alone, or want them.
    """
    products = {each: SquareProduct(each, extent.product_side, device) for each in formats_of(device)}
    work: dict[str, Callable[[], Any]] = {gemm(name): product.run for name, product in products.items()}
    work[COPY] = Copy(extent.copy_bytes, device).run
    wrong += _product_faults(ranks, products)
    turns = max(ranks.share(ranks.local_world)) if shares_cores(ranks, device) else 1
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(WARM_UP_ROUNDS + rounds):
        mine = (ranks.local_rank + number) % turns
        for name, call in work.items():
            for turn in range(turns):
                ranks.meet()
                if turn == mine:
                    seconds[name].append(timer.seconds(call))
    return ranks.share({name: its[WARM_UP_ROUNDS:] for name, its in seconds.items()})


def _product_faults(ranks: Ranks, products: dict[str, SquareProduct]) -> Iterator[str]:
    every = ranks.share({name: each.wrong_elements() for name, each in products.items()})
    for rank, its in enumerate(every):
        for name, count in its.items():
            if count:
                yield f"{gemm(name)}: {count} elements on {ranks.name(rank)} are wrong"
