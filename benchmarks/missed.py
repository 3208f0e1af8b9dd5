"""Why targets are missed: of which benchmarks and rows (globs), and what keeps them there. The first one counts."""

REASONS: tuple[tuple[str, str, str], ...] = (
    (
        "peers*",
        "*fp32*",
        "In fp32 products of linear layers are most of every contender's step, by the same library and near the "
        "machine's GEMM peak (`roofline`, `roofline_60m`): little is left to be faster with, and less the larger the "
        "model.",
    ),
    (
        "peers*",
        "*bf16*",
        "The larger the model, the more of a step are products, at the machine's bf16 peak for everyone; with 1,024 "
        "tokens attention is torch's own kernel, too. What is saved beside them weighs less.",
    ),
    (
        "parallel",
        "our Strategy, *degree 1*",
        "FSDP2 at degree 1 gathered and reduced with itself, as measured here. Since then one rank shards nothing: "
        "`zero3` on it is the plain step.",
    ),
    (
        "precision",
        "*mxfp4_sr,*",
        "At the quickstart's size (512 tokens of 192 numbers, four times a step) GEMMs are small, and casts weigh "
        "most: `mxfp4_sr` hashes every element's number to round it, and rotates four operands.",
    ),
    (
        "precision",
        "*fp16_mxfp8,*",
        "`fp16_mxfp8` multiplies what is fp16 in fp32, where bf16's products have units of their own on this machine; "
        "attention's alone are a third of its step.",
    ),
    (
        "checkpoint_stall",
        "median*",
        "Other work was beside it, which writes to the same disk; with one thread and a quiet machine it had 0.086.",
    ),
    (
        "checkpoint_stall",
        "*",
        "Training waits while parameters and moments are copied to kept memory: on one thread a tenth of a save.",
    ),
)
