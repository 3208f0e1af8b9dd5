"""Breakdown of a training step's time against this machine's GEMM peak: our model and the plain loop's.

A part's time is that of its operators on one thread, from torch's profiler. Everything else (norms, rotations, gates,
residuals, casts, clipping) is elementwise and memory-bound.
"""

import time
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.peer_models import PlainLlama
from benchmarks.peers import DTYPES, Step, our_step, peer_step
from benchmarks.rotation import Row
from benchmarks.shape import Shape

PARTS = {
    "linears": ("aten::mm", "aten::addmm", "aten::_grouped_mm", "lightning_llm::wide"),
    "attention": ("aten::bmm", "aten::_softmax", "aten::_scaled_dot_product", "lightning_llm::short_attention"),
    "loss": ("aten::_log_softmax", "aten::nll_loss"),
    "optimizer": ("aten::_fused_adamw",),
}
"""Name prefixes of a part's operators."""
REST = "element by element"
PEAK_SIZE, REPEATS = 1024, 10


def gemm_peak(dtype: torch.dtype) -> float:
    """Return the most FLOP/s that products of 1,024 x 1,024 matrices of `dtype` reach here."""
    a, seconds = torch.randn(PEAK_SIZE, PEAK_SIZE).to(dtype), float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        torch.mm(a, a)
        seconds = min(seconds, time.perf_counter() - start)
    return 2 * PEAK_SIZE**3 / seconds


def seconds_by_part(step: Step) -> dict[str, float]:
    """Return the time of each part of a step, for the fastest of several steps."""
    found = []
    for _ in range(REPEATS):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            step()
        parts = dict.fromkeys([*PARTS, REST], 0.0)
        for each in seen.key_averages():
            part = next((name for name, begins in PARTS.items() if each.key.startswith(begins)), REST)
            parts[part] += each.self_cpu_time_total / 1e6
        found.append(parts)
    return min(found, key=lambda parts: sum(parts.values()))


def measure(shape: Shape) -> Iterator[Row]:
    """Yield each part's share of a step, the step's share of the GEMM peak, and the largest possible gain on the plain
    loop with these linear layers: if all else took no time, and all else except attention.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with FlopCounterMode(display=False) as counter:  # does not count within our own operators
            peer_step(PlainLlama(shape), shape, False, torch.float32)()
        for name, dtype in DTYPES.items():
            peak = gemm_peak(dtype)
            yield f"{name} GEMM peak of one thread, GFLOP/s", peak / 1e9, ""
            steps = {"ours": our_step(shape, False, dtype), "plain": peer_step(PlainLlama(shape), shape, False, dtype)}
            found = {whose: seconds_by_part(step) for whose, step in steps.items()}
            for whose, parts in found.items():
                whole = sum(parts.values())
                yield f"{whose}, {name}: products' share of the peak", counter.get_total_flops() / whole / peak, ""
                for part, spent in parts.items():
                    yield f"  {part}, share of {1e3 * whole:.0f} ms", spent / whole, ""
            plain, linears = sum(found["plain"].values()), found["ours"]["linears"]
            yield f"plain over ours if all but linears took no time, {name}", plain / linears, ""
            kept = linears + found["ours"]["attention"] + found["ours"]["optimizer"]
            yield f"plain over ours if all but linears, attention and optimizer took no time, {name}", plain / kept, ""
    finally:
        torch.set_num_threads(threads)
