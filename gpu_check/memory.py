"""Memory: the allocator's peak in runs of `lightning-llm train`, relative to the estimate of `lightning-llm plan`."""

from collections.abc import Iterator
from functools import partial

from gpu_check import setting
from gpu_check.checks import Call
from gpu_check.journal import Item, Row, judged
from gpu_check.runs import SideBySide, printed, words

SEQUENCES, LENGTH, STEPS = 4, 2048, 4
TOLERANCE = 0.10
"""Tolerance relative to plan's bytes: library workspaces and some tensors of compiled graphs are in no formula."""
BY_OPERATOR = "trainer.compile=false"
CASES: dict[str, tuple[str, ...]] = {
    "llama_1b, bf16": ("model=llama_1b", "precision=bf16", BY_OPERATOR),
    "llama_160m, bf16": ("model=llama_160m", "precision=bf16", BY_OPERATOR),
    "llama_160m, bf16, blocks recomputed": (
        "model=llama_160m", "precision=bf16", "parallel.activation_checkpoint=full", BY_OPERATOR,
    ),
    "llama_160m, bf16, compiled": ("model=llama_160m", "precision=bf16", "trainer.compile=true"),
    "llama_160m, mxfp8, emulated": (
        "model=llama_160m", "precision=mxfp8", "precision.backend=emulated", BY_OPERATOR,
    ),
    "llama_160m, fp8_current": ("model=llama_160m", "precision=fp8_current", BY_OPERATOR),
}  # fmt: skip


def items(call: Call) -> list[Item]:
    """Return an item per case of `CASES`.

    Runs are parallel, because bytes do not depend on time; sequential on a small device.
    """
    runs = {name: (_folder(name), overrides(name, call)) for name in CASES}
    groups = [[name] for name in CASES] if setting.is_small_device() else [list(CASES)]
    found = []
    for group in groups:
        together = SideBySide(call, "memory", {name: runs[name] for name in group})
        found += [Item(name, 30, partial(compared, name, together, runs[name][1])) for name in group]
    return found


def overrides(name: str, call: Call) -> list[str]:
    """Return the overrides of one case's run."""
    return words(call.scratch, _folder(name), SEQUENCES, LENGTH, STEPS, *CASES[name])


def _folder(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-")


def compared(name: str, runs: SideBySide, words_of_run: list[str]) -> Iterator[Row]:
    """Yield the peak of allocated bytes relative to plan's bytes without its reserve for the allocator."""
    peaks = [record.get("device_memory_peak_bytes", 0) for record in runs.finished(name, STEPS).records()]
    memory = printed("plan", "--json", *words_of_run)["memory_bytes"]
    bytes_planned = memory["total"] - memory["allocator_reserve"]
    ratio = max(peaks) / bytes_planned
    note = f"{max(peaks) / 2**30:.2f} and {bytes_planned / 2**30:.2f} GiB; within {100 * TOLERANCE:g} %"
    yield judged(f"{name}: measured over planned bytes", ratio, "times", abs(ratio - 1) <= TOLERANCE, note)
