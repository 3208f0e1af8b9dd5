"""The axis along which tensor parallelism shards a linear's tensors, by its role: the one table. Imports no torch."""

SHARD_AXES: dict[str, dict[str, int | None]] = {
    "column": {"x": None, "w": 0, "dy": 1},
    "vocabulary": {"x": None, "w": 0, "dy": 1},
    "row": {"x": 1, "w": 1, "dy": None},
    "replicate": {"x": None, "w": None, "dy": None},
    "per_head": {"x": None, "w": None, "dy": None},
    "duplicate": {"x": None, "w": None, "dy": None},
}
"""Of x [M, K], w [N, K] and dy [M, N], by the roles of `Decoder.roles`: Shoeybi et al. 2019, arXiv 1909.08053, section
3. None: every rank has all of it."""
