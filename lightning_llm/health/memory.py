"""A device's memory: how much there is, how fast it is, and whether it keeps what is written."""

import psutil
import torch

PATTERNS = (0x5555555555555555, ~0x5555555555555555)
"""Every bit is written both ways; mixed with the place, so that one that answers for another is seen, too."""
CHUNK_BYTES = 1 << 30


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return the free and the whole memory of `device`, or of the machine, in bytes."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free), int(total)
    memory = psutil.virtual_memory()
    return int(memory.available), int(memory.total)


class Copy:
    """A copy of `size_bytes` within the device's memory."""

    def __init__(self, size_bytes: int, device: torch.device):
        self.source = torch.ones(size_bytes // 4, device=device)
        self.target = torch.zeros_like(self.source)

    @property
    def moved_bytes(self) -> int:
        """What one copy reads and writes."""
        return 2 * self.source.numel() * self.source.element_size()

    def run(self) -> None:
        """Copy once."""
        self.target.copy_(self.source)


def wrong_words(size_bytes: int, device: torch.device) -> int:
    """Write `size_bytes` of memory, all of it before any is read; return how many words of 8 bytes read otherwise."""
    whole, rest = divmod(size_bytes, CHUNK_BYTES)
    counts = [count for count in [*[CHUNK_BYTES // 8] * whole, rest // 8] if count]
    chunks = [torch.empty(count, dtype=torch.int64, device=device) for count in counts]
    return sum(_wrong_words(chunks, each) for each in PATTERNS)


def _wrong_words(chunks: list[torch.Tensor], bits: int) -> int:
    for number, chunk in enumerate(chunks):
        _written(chunk, number, bits)
    read = [
        int((chunk != _written(torch.empty_like(chunk), number, bits)).sum()) for number, chunk in enumerate(chunks)
    ]
    return sum(read)


def _written(chunk: torch.Tensor, number: int, bits: int) -> torch.Tensor:
    """Fill `chunk`, the `number`-th, with the pattern of `bits`; return it."""
    first = number * (CHUNK_BYTES // 8)
    torch.arange(first, first + len(chunk), out=chunk)
    return chunk.bitwise_xor_(bits)
