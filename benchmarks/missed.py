"""Why targets are missed: of which benchmarks and rows (globs), and what keeps them there. The first one counts."""

REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "peers*",
        "*fp32*",
        "In fp32 products of linear layers are 72 % of our step with 7M parameters and 85 % with 62M, 70 and 81 % of a "
        "plain loop's, all by one library near the machine's GEMM peak (`roofline`, `roofline_60m`): with all else for "
        "nothing the larger model would be 1.18 times as fast. Why `train` is slower than the fastest peer with 1,024 "
        "tokens, and compiled with 62M, was not found.",
    ),
    (
        "peers*",
        "*bf16*",
        "The larger the model, the more of a step are products, by one library for everyone (`roofline`, "
        "`roofline_60m`); with 1,024 tokens attention is torch's own kernel, too. What is saved beside them weighs "
        "less.",
    ),
)
