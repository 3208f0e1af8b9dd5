"""Why targets are missed: of which benchmarks and rows (globs), and what keeps them there. The first one counts."""

REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "peers*",
        "*fp32*",
        "In fp32 products of linear layers are 55 to 85 % of our step, by the library that everybody calls, near the "
        "machine's GEMM peak. If all else but attention and the optimizer took no time, a plain loop would take 1.18 "
        "(7M), 1.10 (1,024 tokens) and 1.12 (62M) times as long as ours (`roofline`, `roofline_1024`, "
        "`roofline_60m`). Where `train`, or our compiled model, is slower than the fastest peer, why was not found.",
    ),
    (
        "peers*",
        "*bf16*",
        "With 1,024 tokens attention is half of a step, by torch's own kernel for all; with all else but linear layers "
        "and the optimizer for nothing the gain would be 1.15 (`roofline_1024`). With 62M parameters it would be 1.29, "
        "and products are 70 % of a step (`roofline_60m`); what is saved beside them is not enough.",
    ),
)
