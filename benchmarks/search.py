"""Cost of a layout search: 70B in bf16 and 8B in FP8 on 128 H100s. Nothing runs."""

import time
from collections.abc import Iterator

from benchmarks.rotation import Row
from lightning_llm.config.compose import compose_config
from lightning_llm.plan.search import search
from lightning_llm.plan.search.pricing import Pricer
from lightning_llm.plan.search.space import Space

BATCH = ("cluster=h100_dgx", "world=128", "data.global_batch_size=512", "data.sequence_length=4096")
SEARCHES = {
    "70B, bf16": ("model=llama_70b", "precision=bf16", *BATCH),
    "8B, fp8_subchannel": ("model=llama_8b", "precision=fp8_subchannel", *BATCH),
}


def measure() -> Iterator[Row]:
    """Yield the CPU seconds of each search, and the numbers of layouts considered, evaluated and timed."""
    for name, words in SEARCHES.items():
        config = compose_config(list(words))
        if config.cluster is None or config.world is None:
            raise ValueError(f"{name} names no cluster")
        before = time.process_time()
        pricer = Pricer(Space(config, config.world, {}), config.cluster)
        found = search(pricer)
        yield f"search, {name}: CPU seconds", time.process_time() - before, f"{found.counts['considered']:,} layouts"
        for kind in ("priced", "timed"):
            yield f"search, {name}: layouts {kind}", pricer.counts[kind], ""
