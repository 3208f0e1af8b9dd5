"""Reasons for missed targets: (glob of benchmarks, glob of rows, reason). The first match is used."""

REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "peers*",
        "*fp32*",
        "In fp32, products of linear layers are 55 to 85 % of our step, in the same library for all programs, near the "
        "machine's GEMM peak. If everything except attention and the optimizer took no time, a plain loop would take "
        "1.18 (7M), 1.10 (1,024 tokens) and 1.12 (62M) times as long as ours (`roofline`, `roofline_1024`, "
        "`roofline_60m`). Cases where `train` or our compiled model is slower than the fastest peer are unexplained.",
    ),
    (
        "peers*",
        "*bf16*",
        "With 1,024 tokens attention is half of a step, and all programs use torch's kernel for it. If everything "
        "except linear layers and the optimizer took no time, the gain would be 1.15 (`roofline_1024`). With 62M "
        "parameters it would be 1.29, and matrix products are 70 % of a step (`roofline_60m`): the rest saves too "
        "little.",
    ),
    (
        "experts",
        "*fp32*",
        "In fp32, linear layers take 296 ms of our step and 303 ms of Mixtral's, in the same library, and attention 97 "
        "and 93 ms. If all our operators except these, the loss and AdamW took no time, the ratios would be 1.31 "
        "(eager) and 1.11 (compiled).",
    ),
    (
        "casts",
        "two candidates*",
        "Every element is rounded once per candidate, and its error is added in Transformer Engine's order, before the "
        "cast itself. Both candidates take 2.1 ms; the target leaves 0.8 ms, less than one of them. With products in "
        "fp64 and stored errors it was 4.27.",
    ),
)
