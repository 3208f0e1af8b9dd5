"""`python -m gpu_check.precheck [RECIPE ...]`: compile casts and the loss as Inductor does for CUDA, without a GPU.

In a CPU build of torch, on tensors without data, Inductor turns each cast of a recipe, and the compiled loss with its
gradient (`loss`), into Triton kernels, which Triton's compiler turns into machine code for sm_90 and sm_100. Prints the
kernels, their registers and spills. It needs the package triton (`pip install --no-deps -r requirements/precheck.txt`),
which includes NVIDIA's assembler. Nothing runs, so no bits are compared.
"""

import argparse
import ast
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.model.loss import fp32_loss_sum
from lightning_llm.precision.cast import quantize
from lightning_llm.precision.cast.inductor import OPTIONS
from lightning_llm.precision.cast.random_bits import Origin
from lightning_llm.precision.cast.scales import block_shape, blocked, unblocked

LOSS = "loss"
RECIPES = ("mxfp8", "nvfp4", "mxfp4_sr", "fp8_subchannel", LOSS)
LOGITS = (1, 4096, 128256)
"""Shape of the logits of the loss: tokens of Llama 3's vocabulary."""
CAPABILITIES = (90, 100)
SIZE = 4096
"""Rows and columns of the tensor that is cast."""
TARGET = re.compile(r"^\.target (?P<name>\w+)", re.MULTILINE)
USED = re.compile(r"Used (?P<registers>\d+) registers")
SPILLED = re.compile(r"(?P<bytes>\d+) bytes spill stores")


class Kernel(NamedTuple):
    """A kernel compiled for one `capability`, with the block sizes that spill least, then use the fewest registers."""

    name: str
    capability: int
    choices: int
    """Number of choices of block sizes and warps that a run would try."""
    registers: int
    spilled_bytes: int
    fuses: bool
    """Whether the compiler may fuse a product and a sum, which rounds once instead of twice."""


def cast_stages(cast: CastConfig, axis: int) -> tuple[Callable[..., Any], list[Tensor]]:
    """Return (function that computes a whole cast, its arguments). Call it under a fake tensor mode."""
    x = torch.empty(SIZE, SIZE, dtype=torch.bfloat16, device="cuda")
    key = torch.empty((), dtype=torch.int64, device="cuda")
    delayed = torch.empty((), device="cuda")

    def whole(x: Tensor, key: Tensor, delayed: Tensor) -> Tensor:
        with _Indexing():
            return operand(x, key, delayed)

    def operand(x: Tensor, key: Tensor, delayed: Tensor) -> Tensor:
        shape, origin = block_shape(cast.block, axis), Origin(row_stride=SIZE)
        return unblocked(
            quantize.cast_blocks(blocked(x, shape), cast, shape, None, delayed, key, origin).operand, x, shape
        )

    return whole, [x, key, delayed]


class _Indexing(TorchFunctionMode):
    """Replaces indexing by `:` and None, because Python's indexing needs the tensor's device, absent in a CPU build."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `function`."""
        if function is not torch.Tensor.__getitem__:
            return function(*args, **(kwargs or {}))
        x, indices = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(index is not None and index != slice(None) for index in indices):
            return function(*args)
        for axis, index in enumerate(indices):
            x = x.unsqueeze(axis) if index is None else x
        return x


def triton_of(cast: CastConfig, axis: int, capability: int) -> list[str]:
    """Return the Triton source of each kernel that Inductor generates for `cast` on a GPU of `capability` (e.g. 90)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with planned_gpu(capability):
        with mode:
            function, given = cast_stages(cast, axis)
        return _kernels(function, given, mode, OPTIONS)


def triton_of_loss(capability: int) -> list[str]:
    """Return the Triton source of each kernel of the compiled loss of bf16 logits, forward and backward.

    The graphs come from tensors on the CPU: autograd needs a device that this build of torch has.
    """
    from torch._functorch.aot_autograd import aot_function, make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._subclasses.fake_tensor import FakeTensorMode

    found, mode = list[tuple[GraphModule, list[Tensor]]](), FakeTensorMode(allow_non_fake_inputs=True)

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        found.append((gm, list(example_inputs)))
        return make_boxed_func(gm)

    def partition(graph: GraphModule, inputs: Any, **keys: Any) -> Any:
        joint_graph_passes(graph)
        return min_cut_rematerialization_partition(graph, inputs, **keys)

    with mode:
        logits = torch.empty(LOGITS, dtype=torch.bfloat16).requires_grad_()
        labels = torch.empty(LOGITS[:-1], dtype=torch.int64)
        traced = aot_function(
            fp32_loss_sum(),
            fw_compiler=keep,
            bw_compiler=keep,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )
        traced(logits, labels).backward()
    sources = []
    with planned_gpu(capability):
        for graph, inputs in found:
            for node in graph.graph.nodes:
                if "device" in node.kwargs:
                    node.kwargs = node.kwargs | {"device": torch.device("cuda")}
            graph.recompile()
            with mode:
                given = [torch.empty(each.shape, dtype=each.dtype, device="cuda") for each in inputs]
            sources += _kernels(graph, given, mode, {})
    return sources


def _kernels(function: Callable[..., Any], given: list[Tensor], mode: Any, options: dict[str, Any]) -> list[str]:
    from torch._inductor import config
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    with mode:
        graph = make_fx(function, decomposition_table=select_decomp_table())(*given)
    with config.patch(options), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        lowered = GraphLowering(graph, shape_env=mode.shape_env, example_inputs=given, is_inference=True)
        with V.set_graph_handler(lowered):
            lowered.run(*given)
            code, _ = lowered.codegen()
    text = str(getattr(code, "value", code))
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    written = [call.args[1] for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "triton"]
    return [str(each.value) for each in written if isinstance(each, ast.Constant)]


def compiled(source: str, capability: int, folder: Path) -> Kernel:
    """Compile Triton `source` for all block sizes that Inductor would try; return the best choice as `Kernel`."""
    from torch._inductor import config

    # Kernels for Inductor's launcher are not Triton kernels and have no assembly.
    with planned_gpu(capability), config.patch(use_static_cuda_launcher=False):
        module = _module(source, folder)
        tuner = next(each for each in vars(module).values() if hasattr(each, "configs") and hasattr(each, "fn"))
        made = [tuner._precompile_config(each).kernel for each in tuner.configs]
    found = [_resources(each.asm["ptx"], capability, folder) for each in made]
    registers, spilled = min(found, key=lambda each: (each[1], each[0]))
    fuses = any(each.metadata.enable_fp_fusion or re.search(r"\bfma\.", each.asm["ptx"]) for each in made)
    return Kernel(tuner.fn.__name__, capability, len(made), registers, spilled, fuses)


@contextmanager
def planned_gpu(capability: int) -> Iterator[None]:
    """Context in which torch and Triton see a GPU of that capability, which is not used."""
    import triton
    from torch._dynamo import device_interface
    from torch._inductor import scheduler
    from torch._inductor.runtime import triton_helpers
    from torch.utils import _triton
    from triton.backends.compiler import GPUTarget

    properties = SimpleNamespace(
        name="planned", major=capability // 10, minor=capability % 10, multi_processor_count=132, warp_size=32,
        total_memory=80 << 30, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
        max_threads_per_block=1024, shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
        L2_cache_size=50 << 20, gcnArchName=None,
    )  # fmt: skip
    planned = type("Planned", (device_interface.CudaInterface,), {
        "Worker": type("Worker", (device_interface.CudaInterface.Worker,), {
            "get_device_properties": staticmethod(lambda device=None: properties),
            "current_device": staticmethod(lambda: 0),
        }),
        "get_device_properties": staticmethod(lambda device=None: properties),
        "get_compute_capability": staticmethod(lambda device=None: capability),
        "current_device": staticmethod(lambda: 0),
        "device_count": staticmethod(lambda: 1),
        "is_available": staticmethod(lambda: True),
        "is_triton_capable": staticmethod(lambda device=None: True),
        "raise_if_triton_unavailable": staticmethod(lambda device=None: None),
        "synchronize": staticmethod(lambda device=None: None),
    })  # fmt: skip
    target = GPUTarget("cuda", capability, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device=0: 0,
        set_current_device=lambda device: None, get_active_torch_device=lambda: torch.device("cuda", 0),
        utils=SimpleNamespace(),
    )  # fmt: skip
    before = device_interface.get_interface_for_device("cuda")
    with ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "get_device_properties", lambda device=None: properties),
            (torch.cuda, "get_device_capability", lambda device=None: divmod(capability, 10)),
            (torch.cuda, "current_device", lambda: 0),
            (_triton, "has_triton", lambda *_: True),
            (scheduler, "has_triton", lambda *_: True),  # which may have been imported before
            (triton_helpers, "set_driver_to_gpu", lambda: None),
        ):
            stack.enter_context(patch.object(owner, name, value))
        device_interface.register_interface_for_device("cuda", planned)
        triton.runtime.driver.set_active(driver)
        try:
            yield
        finally:
            device_interface.register_interface_for_device("cuda", before)
            triton.runtime.driver._active = None


def _module(source: str, folder: Path) -> ModuleType:
    with tempfile.NamedTemporaryFile("w", suffix=".py", dir=folder, delete=False) as file:  # Triton reads the source
        file.write(source)
    spec = importlib.util.spec_from_file_location(Path(file.name).stem, file.name)
    if spec is None or spec.loader is None:
        raise ImportError(file.name)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _resources(ptx: str, capability: int, folder: Path) -> tuple[int, int]:
    """Return (registers per thread, spilled bytes), as counted by NVIDIA's assembler."""
    from triton.backends.nvidia.compiler import get_ptxas

    file = folder / "kernel.ptx"
    file.write_text(ptx)
    assembler, target = get_ptxas(capability), TARGET.search(ptx)
    if target is None:
        raise ValueError("Triton's code names no target")
    path, made = getattr(assembler, "path", assembler), folder / "kernel.cubin"
    command = [path, "-v", "--fmad=false", f"--gpu-name={target['name']}", str(file), "-o", str(made)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = USED.search(said), SPILLED.search(said)
    if registers is None or spilled is None:
        raise ValueError(f"the assembler reports no registers: {said}")
    return int(registers["registers"]), int(spilled["bytes"])


def main() -> int:
    """Print a line per kernel; return 1 if one spills or a cast's may fuse a product and a sum, else 0."""
    parser = argparse.ArgumentParser(prog="python -m gpu_check.precheck", description=__doc__)
    parser.add_argument("recipes", nargs="*", default=RECIPES, metavar="RECIPE")
    bad = 0
    with tempfile.TemporaryDirectory() as folder:
        for what, exact, sources_of in _work(parser.parse_args().recipes):
            for capability in CAPABILITIES:
                for source in sources_of(capability):
                    made = compiled(source, capability, Path(folder))
                    print(f"{what} sm_{capability}: {made.name}, {made.registers} registers, "
                          f"{made.spilled_bytes} bytes spilled, best of {made.choices}", flush=True)  # fmt: skip
                    bad += made.spilled_bytes > 0 or (exact and made.fuses)
    return int(bad > 0)


def _work(names: Iterable[str]) -> Iterator[tuple[str, bool, Callable[[int], list[str]]]]:
    """Yield (text, whether its kernels must round every operation, function of a capability to sources), once each."""
    seen: set[tuple[CastConfig, int]] = set()
    for name in names:
        if name == LOSS:
            yield LOSS, False, triton_of_loss
            continue
        for slot, cast in compose_config([f"precision={name}"]).precision.casts_under(None).items():
            axis = 1 if slot in ("fprop.x", "fprop.w", "dgrad.dy") else 0
            if cast.quantizes and (cast, axis) not in seen:
                seen.add((cast, axis))
                yield f"{name} {slot}", True, partial(triton_of, cast, axis)


if __name__ == "__main__":
    sys.exit(main())
