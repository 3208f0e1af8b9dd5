"""Ranks that the search gives to published layouts of others. Nothing runs.

Megatron's ten rows among their neighbours (Narayanan et al. 2021, arXiv 2104.04473, table 1); Frontier's degrees of
tensor parallelism (Dash et al. 2023, arXiv 2312.12705); what Galvatron found for Llama 2 7B on 8 GPUs of 36 GB:
PKU-DAIR/Hetu-Galvatron at cea12ff, galvatron_config_llama2-7b_1nodes_8gpus_per_node_36GB_bf16.json, with 20 of 32
layers recomputed, all ZeRO-3 (dp_types_enc 1), and 16 sequences a step in one micro-batch. Its vocabulary is shared by
2 ranks, which here would take tensor parallelism throughout, and it does not say how long a sequence is.
"""

from collections.abc import Iterator

from benchmarks.published_steps import MEGATRON
from benchmarks.rotation import Row
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.plan.check import layout_rule_problems
from lightning_llm.plan.degrees import resolve_degrees
from lightning_llm.plan.memory import ACCOUNTINGS
from lightning_llm.plan.memory.rank_bytes import memory_bytes
from lightning_llm.plan.resolve import DerivedConfig
from lightning_llm.plan.search import search
from lightning_llm.plan.search.pricing import Pricer
from lightning_llm.plan.search.report import layout_name
from lightning_llm.plan.search.space import Space
from lightning_llm.plan.time.step import StepTimer

A100_BYTES = 80 * 2**30
GALVATRON_BYTES = 36 * 2**30
STEPS = ((1.0, 1.0), (2, 1), (0.5, 1), (1, 2), (1, 0.5), (2, 0.5), (0.5, 2))
"""Factors from a row's tensor- and pipeline-parallel degrees to its neighbors'; the rest is data-parallel."""
LLAMA_2_7B = (
    "model=llama_8b", "model.vocab_size=32000", "model.num_kv_heads=32", "model.ffn_hidden_size=11008",
    "model.rope_theta=10000.0", "model.max_sequence_length=4096", "cluster=a100_dgx", "world=8",
    "data.global_batch_size=16", "data.micro_batch_size=2", "precision=bf16",
)  # fmt: skip
FRONTIER_TP = (1, 2, 4, 8)


def measure() -> Iterator[Row]:
    """Yield the rank of each published layout among its neighbours, and the orderings."""
    first = 0
    for row in MEGATRON:
        name, rank, text = _among_neighbours(compose_config(list(row.words)), row.name)
        first += rank == 1
        yield f"Megatron 2021, {name}: rank among its neighbours", rank, text
    yield "Megatron 2021: rows that are first", first, f"of {len(MEGATRON)}"
    for recipe in ("frontier_22b", "frontier_175b"):
        yield from _frontier(recipe)
    for length in (2048, 4096):
        yield from _galvatron(length)


def _among_neighbours(config: Config, name: str) -> tuple[str, int, str]:
    """Return the rank of a row by seconds among neighbours that fit 80 GiB by Megatron's accounting, 0: it does not."""
    degrees = resolve_degrees(config.parallel, config.world or 1)
    found: dict[tuple[int, int], float] = {}
    for tp_step, pp_step in STEPS:
        tp, pp = degrees.tp * tp_step, degrees.pp * pp_step
        if tp < 1 or pp < 1 or degrees.world % (tp * pp):
            continue
        seconds = _fitting_seconds(_with(config, int(tp), int(pp)))
        if seconds is not None:
            found[int(tp), int(pp)] = seconds
    own = degrees.tp, degrees.pp
    order = sorted(found, key=lambda each: found[each])
    shown = ", ".join(f"TP {tp} PP {pp} {found[tp, pp]:.4g} s" for tp, pp in order)
    rank = order.index(own) + 1 if own in found else 0
    return name, rank, f"{own[0]} x {own[1]}; by seconds: {shown}"


def _with(config: Config, tp: int, pp: int) -> Config:
    """Return the config with these degrees, interleaved as before if its layers and micro-batches allow."""
    world = config.world or 1
    keys = {"tp": tp, "pp": pp, "dp_replicate": world // (tp * pp), "dp_shard": 1, "zero_stage": 0}
    plain = {"schedule": "1f1b", "virtual_stages": 1}
    for schedule in ({}, plain) if pp > 1 else (plain,):
        made = config.model_copy(update={"parallel": config.parallel.model_copy(update={**keys, **schedule})})
        if not layout_rule_problems(DerivedConfig(made)):
            return made
    return made


def _fitting_seconds(config: Config) -> float | None:
    found = DerivedConfig(config)
    if config.cluster is None or layout_rule_problems(found):
        return None
    plan = found.plan()
    if memory_bytes(plan, ACCOUNTINGS["megatron"])["total"] > A100_BYTES:
        return None
    return StepTimer(plan, config.cluster).time.total


def _frontier(recipe: str) -> Iterator[Row]:
    config = compose_config([f"recipe={recipe}", "cluster=frontier", "hardware=null"])
    seconds = {}
    for tp in FRONTIER_TP:
        made = config.model_copy(update={"parallel": config.parallel.model_copy(update={"tp": tp})})
        found = DerivedConfig(made)
        if config.cluster is not None and not layout_rule_problems(found):
            seconds[tp] = StepTimer(found.plan(), config.cluster).time.total
    order = sorted(seconds, key=lambda each: seconds[each])
    shown = ", ".join(f"TP {tp} {seconds[tp]:.4g} s" for tp in order)
    yield f"{recipe}: TP 2 before 4 before 8", float(order.index(2) < order.index(4) < order.index(8)), shown


def _galvatron(length: int) -> Iterator[Row]:
    config = compose_config([*LLAMA_2_7B, f"data.sequence_length={length}"])
    if config.cluster is None:
        raise ValueError("the words name no cluster")
    modes = ("full",) * 20 + ("none",) * 12
    keys = {"dp_shard": 8, "zero_stage": 3, "activation_checkpoint_layers": modes}
    plan = DerivedConfig(config.model_copy(update={"parallel": config.parallel.model_copy(update=keys)})).plan()
    held, theirs = memory_bytes(plan)["total"], StepTimer(plan, config.cluster).time.total
    fits = f"{'fits' if held <= GALVATRON_BYTES else 'does not fit'} 36 GiB"
    yield f"Galvatron, Llama 2 7B, {length} tokens: GiB a rank of its plan", held / 2**30, fits
    pricer = Pricer(Space(config, 8, {"cp": 1}), config.cluster, GALVATRON_BYTES)
    found = search(pricer, by_block=True)
    if found.fitting:
        best = found.fitting[0]
        text = f"{layout_name(best)}, {best.memory_bytes / 2**30:.1f} GiB; theirs {theirs:.4g} s"
        yield f"Galvatron, {length} tokens: seconds of its plan over the fastest found", theirs / best.seconds, text
