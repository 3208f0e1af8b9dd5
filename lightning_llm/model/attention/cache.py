"""Key-value cache of attention, so that a step computes keys and values only for its new tokens.

Latent attention keeps a latent and a rotated key for each token in their place (one head, two widths).

Letters: B sequences, S tokens kept, G key/value heads, K elements per head.
"""

import torch
from torch import Tensor

from lightning_llm.model.attention.cpu_kernel import ROWS


class KeyValueCache:
    """Room for `length` tokens, or for those that a window still sees, in whole blocks of `ROWS` tokens.

    The number of slots that a query sees depends only on its position. So every matrix product of a position has one
    shape, for any split of the tokens into calls. The first `append` allocates all memory, in the dtype and on the
    device of its tensors.
    """

    def __init__(self, batch_size: int, length: int, window: int | None = None):
        blocks = -(-length // ROWS)
        if window is not None:
            blocks = min(blocks, -(-(window - 1) // ROWS) + 1)
        self.batch_size, self.window = batch_size, window
        self.capacity = blocks * ROWS
        self.longest = length
        self.length = 0
        """Tokens seen so far; the next one's position."""
        self.first = 0
        """Position of the first slot, a multiple of `ROWS`."""
        self._slots: tuple[Tensor, Tensor] | None = None

    def append(self, k: Tensor, v: Tensor) -> None:
        """Append `k` and `v` `[B, n, G, K]` of the next n tokens, all within one block of `ROWS` positions.

        Raises ValueError if they exceed the length of the cache or differ from its batch size.
        """
        count = k.shape[1]
        if k.shape[0] != self.batch_size or self.length + count > self.longest:
            made, asked = f"{self.batch_size} x {self.longest}", f"{k.shape[0]} x {self.length + count}"
            raise ValueError(f"the cache has room for {made} tokens, but {asked} were given")
        if self._slots is None:
            sizes = [(self.batch_size, self.capacity, *new.shape[2:]) for new in (k, v)]
            self._slots = k.new_zeros(sizes[0]), v.new_zeros(sizes[1])  # zeros: a hidden value is multiplied by 0
        self._move_to(max(0, self.block_end - self.capacity))
        start = self.length - self.first
        for slots, new in zip(self._slots, (k, v), strict=True):
            slots[:, start : start + count] = new
        self.length += count

    @property
    def block_end(self) -> int:
        """The position after the block of the next token."""
        return (self.length // ROWS + 1) * ROWS

    def seen_from(self, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values `[B, S, G, K]`, and the mask, bool `[1, 1, ROWS, S]`, of the queries of a block.

        The block, the one of the last token appended, begins at position `block`; S leads up to its end. Slots of
        tokens still to come hold zeros and are hidden.
        """
        if self._slots is None:
            raise ValueError("the cache is empty")
        k, v = (slots[:, : block + ROWS - self.first] for slots in self._slots)  # [B, S, G, K]
        queries = torch.arange(block, block + ROWS, device=k.device)[:, None]  # [ROWS, 1]
        keys = torch.arange(self.first, block + ROWS, device=k.device)  # [S]
        seen = keys <= queries  # [ROWS, S]
        if self.window is not None:
            seen = seen & (keys > queries - self.window)
        return k, v, seen[None, None]

    def _move_to(self, first: int) -> None:
        """Drop the slots before position `first`."""
        dropped = first - self.first
        if dropped > 0 and self._slots is not None:
            for slots in self._slots:
                slots[:, :-dropped] = slots[:, dropped:].clone()
                slots[:, -dropped:] = 0
            self.first = first
