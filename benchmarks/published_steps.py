"""Published step times: overrides of a plan and the measured value. Every row names its source.

pytorch/torchtitan, benchmarks/*.md at b5bcd76; NVIDIA/Megatron-LM, examples/academic_paper_scripts/sc21/*.sh at
d98e8a6, which have the configs of Narayanan et al. 2021 (arXiv 2104.04473), Table 1 and figures 11 to 17; Dash et al.
2023 (arXiv 2312.12705).
"""

from dataclasses import dataclass
from typing import Literal

Unit = Literal["tokens/s", "TFLOP/s", "% of peak"]
"""Per device. TFLOP/s and percent of Megatron's count of FLOPs, including recomputation (arXiv 2104.04473, eq. 3)."""


@dataclass(frozen=True)
class Published:
    """One measured run: its table, a name, the overrides of its plan, and the measured value."""

    table: str
    name: str
    words: tuple[str, ...]
    value: float
    unit: Unit = "tokens/s"


# torchtitan's H100s have 96 GB of HBM2e at 2.4 TB/s and a limit of 500 W; the peak at that power is not published.
GRAND_TETON = ("cluster=h100_dgx", "hardware=null", "cluster.memory_gb_per_second=2400")
EVERY_BLOCK = ("precision.modules.first_blocks_high_precision=0", "precision.modules.last_blocks_high_precision=0")
FLOAT8 = ("precision=fp8_current", *EVERY_BLOCK)
COMPILE, UNCOMPILED = ("parallel.compile=true",), ("parallel.compile=false",)


def _titan(model: str, world: int, micro_batch: int, batch: int, *more: str) -> tuple[str, ...]:
    recipe = {"8b": "llama3_8b_fsdp2", "70b": "llama3_70b_2d", "405b": "llama3_405b_3d"}[model]
    sizes = f"data.micro_batch_size={micro_batch}", f"data.global_batch_size={batch}"
    compiled = () if COMPILE[0] in more else UNCOMPILED
    return (
        f"recipe={recipe}",
        f"world={world}",
        *compiled,
        *sizes,
        *(() if "cluster=h200_dgx" in more else GRAND_TETON),
        *more,
    )


def _long(tokens: int) -> tuple[str, ...]:
    return f"data.sequence_length={tokens}", f"model.max_sequence_length={tokens}"


def _context(cp: int) -> tuple[str, ...]:
    """8B on 8 GPUs, one sequence per rank of FSDP 8 / cp; without FSDP, ranks that share a sequence share shards."""
    words = (
        "parallel=fsdp_cp",
        "parallel.activation_checkpoint=full",
        f"parallel.cp={cp}",
        "parallel.reduction=native",
    )
    return _titan("8b", 8, 1, 8 // cp, *words, *FLOAT8, *COMPILE, *_long(32768 * cp))


def _four_dimensions(cp: int) -> tuple[str, ...]:
    """405B: local batch 8 as 8 micro-batches of one sequence, as many as the pipeline has ranks."""
    words = ("parallel.schedule=1f1b", "parallel.virtual_stages=1", f"parallel.cp={cp}")
    return _titan("405b", 512, 1, 8 * 8 // cp, *words, *_long(32768 * cp))


_H200 = ("cluster=h200_dgx", "hardware=null", *FLOAT8, *COMPILE)
_TP8 = ("parallel=fsdp_tp", "parallel.tp=8", "parallel.zero_stage=3", "parallel.reduction=native")
TITAN = (
    Published("torchtitan, 1", "8B, FSDP 8", _titan("8b", 8, 2, 16), 5762),
    Published("torchtitan, 1", "8B, FSDP 8, compiled", _titan("8b", 8, 2, 16, *COMPILE), 6667),
    Published("torchtitan, 1", "8B, FSDP 8, compiled, Float8", _titan("8b", 8, 2, 16, *COMPILE, *FLOAT8), 8532),
    Published("torchtitan, 2", "8B, FSDP 8, 32K", _context(1), 3890),
    Published("torchtitan, 2", "8B, FSDP 4 x CP 2, 64K", _context(2), 2540),
    Published("torchtitan, 2", "8B, FSDP 2 x CP 4, 128K", _context(4), 1071),
    Published("torchtitan, 2", "8B, CP 8, 256K", _context(8), 548),
    Published("torchtitan, 3", "8B, FSDP 128", _titan("8b", 128, 2, 256), 5605),
    Published("torchtitan, 3", "8B, FSDP 128, compiled", _titan("8b", 128, 2, 256, *COMPILE), 6514),
    Published("torchtitan, 3", "8B, FSDP 128, compiled, Float8", _titan("8b", 128, 2, 256, *COMPILE, *FLOAT8), 8380),
    Published("torchtitan, 4", "70B, FSDP 32 x TP 8, Float8", _titan("70b", 256, 16, 512, *COMPILE, *FLOAT8), 829),
    Published(
        "torchtitan, 5",
        "405B, FSDP 8 x TP 8 x PP 8, 1F1B",
        _titan("405b", 512, 4, 256, "parallel.schedule=1f1b", "parallel.virtual_stages=1"),
        100,
    ),
    Published("torchtitan, 5", "405B, FSDP 8 x TP 8 x PP 8, interleaved", _titan("405b", 512, 4, 256), 128),
    Published("torchtitan, 6", "405B, TP 8 x PP 8, FSDP 8, 32K", _four_dimensions(1), 76),
    Published("torchtitan, 6", "405B, TP 8 x PP 8, FSDP 4 x CP 2, 64K", _four_dimensions(2), 47),
    Published("torchtitan, 6", "405B, TP 8 x PP 8, FSDP 2 x CP 4, 128K", _four_dimensions(4), 31),
    Published("torchtitan, 6", "405B, TP 8 x PP 8, CP 8, 256K", _four_dimensions(8), 16),
    Published("torchtitan, TP baseline", "70B, FSDP 32 x TP 8", _titan("70b", 256, 16, 512, *COMPILE), 597.3),
    Published(
        "torchtitan, TP baseline",
        "70B, FSDP 32 x TP 8, Float8",
        _titan("70b", 256, 16, 512, *COMPILE, *FLOAT8),
        809.8,
    ),
    Published("torchtitan, TP baseline", "8B, FSDP 8 x TP 8", _titan("8b", 64, 12, 96, *_TP8, *COMPILE), 4378),
    Published(
        "torchtitan, TP baseline",
        "8B, FSDP 8 x TP 8, Float8",
        _titan("8b", 64, 12, 96, *_TP8, *COMPILE, *FLOAT8),
        5078.1,
    ),
    Published("torchtitan, H200", "8B, FSDP 32, compiled, Float8", _titan("8b", 32, 2, 64, *_H200), 10938),
    Published("torchtitan, H200", "8B, FSDP 64, compiled, Float8", _titan("8b", 64, 2, 128, *_H200), 10753),
)


def megatron(
    layers: int, hidden: int, heads: int, tp: int, pp: int, world: int, micro_batch: int, batch: int, *more: str
) -> tuple[str, ...]:
    """Return the overrides of a GPT as trained by Megatron-LM of 2021, with whole blocks recomputed.

    Its weights and gradient sums have 16 bits (`--fp16`, without accumulation in fp32), as with bf16_true here. It sums
    gradients by rings, overlapped with the backward pass without a pipeline (`--DDP-impl torch`), after it with one.
    So does reduction=tree if each machine has one rank of a data-parallel group (TP 8).
    """
    reduction = "tree" if pp > 1 and tp >= 8 else "native"
    return (
        "recipe=megatron_gpt3_175b", "precision=bf16_true", "cluster=a100_dgx", f"world={world}",
        "model.vocab_size=51200", *UNCOMPILED,
        f"model.num_layers={layers}", f"model.hidden_size={hidden}", f"model.ffn_hidden_size={4 * hidden}",
        f"model.num_heads={heads}", f"model.num_kv_heads={heads}", f"parallel.tp={tp}", f"parallel.pp={pp}",
        f"parallel.reduction={reduction}", "parallel.activation_checkpoint=full",
        f"data.micro_batch_size={micro_batch}", f"data.global_batch_size={batch}", *more,
    )  # fmt: skip


def interleaved(stages: int) -> tuple[str, ...]:
    """Return the overrides of the interleaved schedule with that many stages per rank."""
    return "parallel.schedule=interleaved_1f1b", f"parallel.virtual_stages={stages}"


_TABLE_1 = "Megatron 2021, 1"
MEGATRON = (
    Published(_TABLE_1, "1.7B", megatron(24, 2304, 24, 1, 1, 32, 16, 512), 137, "TFLOP/s"),
    Published(_TABLE_1, "3.6B", megatron(30, 3072, 32, 2, 1, 64, 16, 512), 138, "TFLOP/s"),
    Published(_TABLE_1, "7.5B", megatron(36, 4096, 32, 4, 1, 128, 16, 512), 142, "TFLOP/s"),
    Published(_TABLE_1, "18B", megatron(40, 6144, 48, 8, 1, 256, 8, 1024), 135, "TFLOP/s"),
    Published(_TABLE_1, "39B", megatron(48, 8192, 64, 8, 2, 512, 4, 1536), 138, "TFLOP/s"),
    Published(_TABLE_1, "76B", megatron(60, 10240, 80, 8, 4, 1024, 2, 1792, *interleaved(3)), 140, "TFLOP/s"),
    Published(_TABLE_1, "145B", megatron(80, 12288, 96, 8, 8, 1536, 2, 2304, *interleaved(2)), 148, "TFLOP/s"),
    Published(_TABLE_1, "310B", megatron(96, 16384, 128, 8, 16, 1920, 1, 2160, *interleaved(2)), 155, "TFLOP/s"),
    Published(_TABLE_1, "530B", megatron(105, 20480, 128, 8, 35, 2520, 1, 2520, *interleaved(3)), 163, "TFLOP/s"),
    Published(_TABLE_1, "1T", megatron(128, 25600, 160, 8, 64, 3072, 1, 3072), 163, "TFLOP/s"),
)

_SLINGSHOT = ("cluster=frontier", "hardware=null", "parallel.zero_stage=1", "parallel.reduction=native")
_RANKS = ("parallel.dp_replicate=1", "parallel.dp_shard=null")
# The percentages are the abstract's; degrees and batch of the paper's recipes were not re-read.
FRONTIER = (
    Published(
        "Frontier",
        "175B, TP 4 x PP 16",
        megatron(96, 12288, 96, 4, 16, 1024, 1, 640, *_SLINGSHOT, *_RANKS),
        36.14,
        "% of peak",
    ),
    Published(
        "Frontier",
        "1T, TP 8 x PP 64",
        megatron(128, 25600, 160, 8, 64, 1024, 1, 1600, *_SLINGSHOT, *_RANKS),
        31.96,
        "% of peak",
    ),
)

ROWS = (*TITAN, *MEGATRON, *FRONTIER)


@dataclass(frozen=True)
class Ordering:
    """Statement of a figure: plans by name, the fastest first."""

    figure: str
    words: dict[str, tuple[str, ...]]


def _by(name: str, plans: dict[int, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {f"{name} {value}": words for value, words in plans.items()}


_WEAK = {
    batch: {pp: megatron(3 * pp, 20480, 128, 8, pp, 8 * pp, 1, batch) for pp in (1, 2, 4, 8)} for batch in (8, 128)
}
_175B = {batch: megatron(96, 12288, 96, 8, 12, 96, 1, batch) for batch in (12, 36, 60)}
_162B = {tp: megatron(32, 20480, 128, tp, 64 // tp, 64, 1, 128) for tp in (2, 4, 8, 16, 32)}
_5B9 = {batch: {pp: megatron(32, 3840, 32, 1, pp, 64, 1, batch) for pp in (2, 4, 8, 16, 32)} for batch in (32, 512)}
_5B9_TP = {batch: {tp: megatron(32, 3840, 32, tp, 1, 64, 1, batch) for tp in (2, 4, 8, 16, 32)} for batch in (32, 512)}
_91B = {size: megatron(32, 15360, 128, 8, 8, 64, size, 128) for size in (1, 2, 4, 8)}
_145B = megatron(80, 12288, 96, 8, 16, 128, 1, 16)

ORDERINGS = (
    Ordering("11: fewer stages are faster at batch 8", _by("PP", _WEAK[8])),
    Ordering("11: and at batch 128", _by("PP", _WEAK[128])),
    *(
        Ordering(
            f"12: interleaved is faster at batch {batch}",
            {"interleaved": (*words, *interleaved(4)), "1F1B": words},
        )
        for batch, words in _175B.items()
    ),
    Ordering("13: TP 8, a whole node, is faster than more", _by("TP", {tp: _162B[tp] for tp in (8, 16, 32)})),
    Ordering("13: and than less", _by("TP", {tp: _162B[tp] for tp in (8, 4, 2)})),
    Ordering("14: data is faster than pipeline parallelism at batch 32", _by("PP", _5B9[32])),
    Ordering("14: and at batch 512", _by("PP", _5B9[512])),
    Ordering("15: data is faster than tensor parallelism at batch 32", _by("TP", _5B9_TP[32])),
    Ordering("15: and at batch 512", _by("TP", _5B9_TP[512])),
    Ordering("16: micro-batches of 2 are faster than of 1", _by("size", {size: _91B[size] for size in (2, 1)})),
    Ordering("16: and than of 4 and 8", _by("size", {size: _91B[size] for size in (2, 4, 8)})),
    Ordering(
        "17: without recomputation is faster at one batch",
        {"none": (*_145B, "parallel.activation_checkpoint=none"), "full": _145B},
    ),
)
"""From arXiv 2104.04473 section 5, without figure 18, which shows an optimization that is not implemented here."""
