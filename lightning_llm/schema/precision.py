"""`precision`: which number formats a run computes and keeps its state in."""

from typing import Literal

from lightning_llm.schema.base import Group


class PrecisionConfig(Group):
    """A precision recipe."""

    name: str
    compute_dtype: Literal["fp32", "bf16", "fp16"]
