"""malloc keeps freed memory with glibc, unless the user configures it: counted by page faults."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tests the malloc of glibc")

PAGES = (40 << 20) // os.sysconf("SC_PAGE_SIZE")
COUNTED = """
import resource
from lightning_llm.base.host_memory import give_back, keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        bytearray(40 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first, kept = faults(), keep_memory()
faults()
again = faults()
give_back()
print(first, int(kept), again, faults(), faults())
"""


def counted(**environment: str) -> list[int]:
    """Return page faults of five blocks of 40 MB by default; whether it is kept; faults then, given back, and after."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_", "LD_"))}
    said = subprocess.run(
        [sys.executable, "-c", COUNTED], env={**own, **environment}, capture_output=True, text=True, check=True
    )
    return [int(word) for word in said.stdout.split()]


def test_a_freed_block_is_there_for_the_next_one_and_is_given_back_at_the_end():
    first, kept, again, trimmed, after = counted()
    assert kept == 1
    assert first > 4 * PAGES / 512  # in huge pages at least
    assert again < first / 20
    assert trimmed > again + PAGES / 512 / 2
    assert after > first / 2  # nothing is kept any more


def test_the_user_s_malloc_settings_are_respected():
    first, kept, again, *_ = counted(MALLOC_MMAP_MAX_="65536")
    assert kept == 0
    assert again > first / 2
