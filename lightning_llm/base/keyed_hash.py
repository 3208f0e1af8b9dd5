"""Random 32-bit words as a pure function of a key, by MurmurHash3_x86_32 (A. Appleby, public domain).

Runs use no random streams: initial weights, the order of the data and the bits of stochastic rounding are hashes of
their key (seed, step, micro-batch, name, element, ...). So they are the same under every layout and after every resume,
and each can be computed alone. All arithmetic is unsigned modulo 2^32, in Python integers; the tensor version in
`precision` must give the same words (the tests have known answers).
"""

from dataclasses import dataclass
from hashlib import blake2b

MASK_32 = 0xFFFFFFFF


def _rotate_left(x: int, bits: int) -> int:
    return ((x << bits) | (x >> (32 - bits))) & MASK_32


def mix(h: int) -> int:
    """Return MurmurHash3's 32-bit finalizer of `h`, a bijection on [0, 2^32)."""
    h ^= h >> 16
    h = h * 0x85EBCA6B & MASK_32
    h ^= h >> 13
    h = h * 0xC2B2AE35 & MASK_32
    return h ^ (h >> 16)


def hash_words(*words: int, seed: int = 0) -> int:
    """Return MurmurHash3_x86_32 of `words` (each taken modulo 2^32, little-endian) with `seed`, in [0, 2^32)."""
    h = seed & MASK_32
    for word in words:
        k = word * 0xCC9E2D51 & MASK_32
        k = _rotate_left(k, 15) * 0x1B873593 & MASK_32
        h = (_rotate_left(h ^ k, 13) * 5 + 0xE6546B64) & MASK_32
    return mix(h ^ (4 * len(words)))


def name_word(name: str) -> int:
    """Return a 32-bit hash of `name` (BLAKE2b-32 of its UTF-8), the same on every machine and Python."""
    return int.from_bytes(blake2b(name.encode(), digest_size=4).digest(), "little")


@dataclass(frozen=True)
class StepKey:
    """Key of the random bits of one micro-batch, equal in every parallel layout.

    `step` counts optimizer steps from 0. `micro_batch` counts the micro-batches of a step over all data-parallel ranks.
    """

    seed: int
    step: int
    micro_batch: int

    def word(self, *more: int) -> int:
        """Return a 32-bit key for this micro-batch and the numbers `more` (layer, slot, ...)."""
        return hash_words(self.step, self.micro_batch, *more, seed=self.seed)
