"""`python -m gpu_check.fake_cuda [RECIPE ...]`: a whole training step on CUDA tensors without data, without a GPU.

Every operation of the step, forward, backward and update, runs on fake CUDA tensors with emulated casts: a missing
kernel, an operand on another device, or a use of CUDA that no stream or event explains is an error. No numbers are
computed. It needs a CUDA build of torch and a C compiler: autograd asks CUDA for its devices and streams, which a
library of a few functions, loaded before CUDA's own, answers. Any other call of CUDA fails for want of a driver.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_llm.config.compose import compose_config
from lightning_llm.dry_run.rank import RankCounts, count_step
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.check import check_config

RECIPES = ("bf16", "fp8_current", "mxfp8", "mxfp4_sr")
LAYOUTS = {"single": 1, "zero3": 2, "tp": 2}
"""Ranks of each layout."""
RANKS = "FAKE_CUDA_DEVICES"
DEVICE = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132
)
DRIVER = """
#include <stdlib.h>
typedef void *handle;
static int current;
static long handles = 0x1000;
static int nothing(void) { return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cudaDriverGetVersion(int *version) { *version = 14000; return 0; }
int cudaGetDriverEntryPointByVersion(const char *name, handle *found, unsigned version, unsigned long long flags,
                                     int *status) { *found = (handle)nothing; if (status) *status = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = atoi(getenv("FAKE_CUDA_DEVICES")); return 0; }
int cudaGetDevice(int *device) { *device = current; return 0; }
int cudaSetDevice(int device) { current = device; return 0; }
int cudaGetDeviceProperties(void *properties, int device) { return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cudaDeviceSynchronize(void) { return 0; }
int cudaStreamCreateWithPriority(handle *stream, unsigned flags, int priority)
{ *stream = (handle)(handles += 16); return 0; }
int cudaStreamIsCapturing(handle stream, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo(handle stream, int *status) { *status = 0; return 0; }
int cudaStreamWaitEvent(void) { return 0; }
int cudaStreamSynchronize(void) { return 0; }
int cudaStreamQuery(void) { return 0; }
int cudaEventCreateWithFlags(handle *event, unsigned flags) { *event = (handle)(handles += 16); return 0; }
int cudaEventRecord(void) { return 0; }
int cudaEventRecordWithFlags(void) { return 0; }
int cudaEventQuery(void) { return 0; }
int cudaEventSynchronize(void) { return 0; }
int cudaEventDestroy(void) { return 0; }
"""
"""Devices, streams and events in C; its soname is the driver's, so that torch finds no other."""


class FakeCuda(FakeTensorMode):
    """Fake tensors that never initialize their device, although torch sees one."""

    avoid_device_init = True


def step(recipe: str, layout: str) -> RankCounts:
    """Return the counts of rank 0's step. Once per process: it joins a fake group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    ranks, device = LAYOUTS[layout], torch.device("cuda", 0)
    words = ["model=llama_tiny", "model.hidden_size=256", "model.num_heads=4", "model.num_kv_heads=2"]
    words += [f"precision={recipe}", f"parallel={layout}", f"trainer.devices={ranks}"]
    words += ["data.micro_batch_size=2", "data.global_batch_size=8", "parallel.compile=false"]
    plan = check_config(compose_config(words))
    if ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with (
        patch.object(torch.cuda, "get_device_properties", lambda *_: DEVICE),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (DEVICE.major, DEVICE.minor)),
        patch.object(torch.cuda, "get_device_name", lambda *_: DEVICE.name),
    ):
        on_rank = Layout.from_config(plan.config.parallel, plan.degrees, device)
        return count_step(plan, on_rank, FakeCuda(allow_non_fake_inputs=True), device=device, casts="eager")


def compile_driver(folder: Path) -> Path:
    """Return the library of `DRIVER`, compiled. Raises CalledProcessError, FileNotFoundError without a compiler."""
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(DRIVER)
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(source), "-o"]
    subprocess.run([*command, str(library)], check=True)
    return library


def main() -> int:
    """Print a line per recipe and layout; return 1 if a step failed, 2 if this torch has no CUDA, else 0."""
    parser = argparse.ArgumentParser(prog="python -m gpu_check.fake_cuda", description=__doc__)
    parser.add_argument("recipes", nargs="*", default=RECIPES, metavar="RECIPE")
    parser.add_argument("--layout", choices=LAYOUTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if torch.version.cuda is None:
        print(f"torch {torch.__version__} has no CUDA. Install a CUDA build of torch.", file=sys.stderr)
        return 2
    if given.layout:
        (recipe,) = given.recipes
        counts = step(recipe, given.layout)
        print(f"{counts.operations} operations, {counts.host_waits} host waits, sent {counts.sent_bytes}")
        return 0
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        library = str(compile_driver(Path(folder)))
        for recipe in given.recipes:
            for layout, ranks in LAYOUTS.items():
                command = [sys.executable, "-m", "gpu_check.fake_cuda", recipe, "--layout", layout]
                environment = os.environ | {"LD_PRELOAD": library, RANKS: str(ranks)}
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no output"]
                failed += done.returncode != 0
                print(f"{recipe} {layout}: {lines[-1] if done.returncode == 0 else 'FAILED: ' + lines[-1]}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
