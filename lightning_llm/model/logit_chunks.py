"""Number of logits that the loss computes at once: for `model.loss`, and for the planner, without torch."""

CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 27}
"""Logits that the loss takes to fp32 at once, by kind of device."""

WHOLE_LOGITS = {"cpu": 1 << 26, "cuda": 1 << 29}
"""Logits of a micro-batch, by kind of device, that are there at once at most: 128 MB and 1 GB of bf16. Of each chunk
the weight's gradient is added to an fp32 sum, 8 bytes of memory traffic per element: few and large ones are better."""
ROWS_PER_COLUMN = 4
"""Rows of hidden states for each of their columns, from which on chunks are made. They save 2 x 2 bytes of bf16 logits
and their gradient for each row and id, and take up to 6 bytes of the weight's gradient and its sum for each column."""


def rows_at_once(rows: int, columns: int, ids: int, kind: str) -> int:
    """Return how many of the `rows` of logits [rows, ids] are in memory at once on a `kind` of device.

    All, or about equally many in each chunk.
    """
    if rows < ROWS_PER_COLUMN * columns:
        return rows
    chunks = -(-rows * ids // WHOLE_LOGITS.get(kind, WHOLE_LOGITS["cuda"]))
    return -(-rows // max(1, chunks))
