"""Transformer Engine's Python (2.20.2) on a CPU: only its compiled module is a stand-in.

What is real: recipes, `te.Linear`, its autograd function, quantisers, storage classes, `autocast`, weight caching, and
the checks of what a device supports. What is not: `transformer_engine_torch`, whose casts and GEMMs are those of
`stub_kernels.py`; CUDA's answers, which are `Device`'s, and seen by the library's modules alone; and three things that
no linear needs (Triton's kernels, JAX, `einops`).
"""

import functools
import importlib
import importlib.util
import sys
import warnings
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

from lightning_llm.precision.linear.plan import Shard
from lightning_llm.precision.native.transformer_engine import NativeLinear
from tests.precision.native import stub_kernels

FOLDER = Path(sys.prefix) / "transformer_engine"
PINNED = Path(__file__).parents[3] / "requirements/transformer_engine.txt"
ABSENT = ("transformer_engine.pytorch.triton", "transformer_engine.pytorch.onnx_extensions", "einops")
MISSING = f"""Transformer Engine's Python is not in {FOLDER}: `make setup` puts it there, or
  pip install --no-deps --no-compile --target {FOLDER} -r {PINNED}"""


class Absent:
    """Something that the import of a module takes and no test here calls."""

    def __call__(self, *_, **__):
        return self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self


class AbsentModules(MetaPathFinder, Loader):
    """Provides empty modules for missing packages while the library is imported."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith(ABSENT) else None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = Absent().__getattr__
        return module

    def exec_module(self, module):
        pass


class Device:
    """Answers of `torch.cuda` to the library about a simulated GPU; tensors are on the CPU (device None)."""

    capability = (9, 0)

    def is_available(self):
        return True

    def current_device(self):
        return None

    def is_current_stream_capturing(self):
        return False

    def get_device_capability(self, device=None):
        return self.capability

    def get_device_properties(self, device=None):
        major, minor = self.capability
        return SimpleNamespace(major=major, minor=minor, multi_processor_count=132)


class Torch(ModuleType):
    """torch, as the library's modules see it."""

    cuda = Device()
    version = SimpleNamespace(cuda="13.0")

    def __getattr__(self, name):
        return getattr(torch, name)


def on_a_gpu(method):
    """Have a method find its tensors `is_cuda`."""

    @functools.wraps(method)
    def called(*args, **kwargs):
        with mock.patch.object(torch.Tensor, "is_cuda", True):
            return method(*args, **kwargs)

    return called


@contextmanager
def importable():
    """Have the library found, and built by no one: it then loads no shared library when it is imported."""
    finder, before = AbsentModules(), dict(sys.modules)
    sys.modules |= {"transformer_engine_torch": stub_kernels.module(), "transformer_engine.jax": None}
    sys.path.insert(0, str(FOLDER))
    sys.meta_path.insert(0, finder)
    try:
        with mock.patch.dict("os.environ", {"NVTE_PROJECT_BUILDING": "1"}), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        sys.meta_path.remove(finder)
        sys.path.remove(str(FOLDER))
        for name in [name for name in sys.modules if name.startswith("transformer_engine") or name == "einops"]:
            if name not in before:
                del sys.modules[name]


@functools.cache
def modules() -> dict[str, ModuleType]:
    """Import the library once and return its entries of `sys.modules`, which are then removed there.

    Raises FileNotFoundError, with instructions, if it is missing.
    """
    if not (FOLDER / "transformer_engine").is_dir():
        raise FileNotFoundError(MISSING)
    with importable():
        sys.modules["transformer_engine.pytorch"] = None  # which its parent tries, and lets be
        common = importlib.import_module("transformer_engine.common")
        del sys.modules["transformer_engine.pytorch"]
        common.load_framework_extension = lambda framework: None
        base = importlib.import_module("transformer_engine.pytorch.module.base").TransformerEngineBaseModule
        found = {name: module for name, module in sys.modules.items() if name.startswith("transformer_engine")}
    base.prepare_forward = on_a_gpu(base.prepare_forward)
    seen = Torch("torch")
    for module in found.values():
        if getattr(module, "torch", None) is torch:
            module.torch = seen
        if hasattr(module, "_empty_tensor"):
            module._empty_tensor = torch.Tensor  # its own calls .cuda()
    return found


def emulate_random_bits(patch) -> None:
    """Make kernels draw the emulation's random bits for the layer and the part given by the generator's seed word."""
    seeded, word_of = {}, NativeLinear.random_word

    def random_word(layer):
        word = word_of(layer)
        seeded[word] = layer.keys, layer.plan.shards.get("dy", Shard()).origin
        return word

    def manual_seed(word):
        stub_kernels.Generator.keys, stub_kernels.Generator.origin = seeded[word]

    patch.setattr(NativeLinear, "random_word", random_word)
    patch.setattr("torch.cuda.manual_seed", manual_seed)


def device(major: int, minor: int = 0) -> None:
    """Have the library find a GPU of this compute capability, and forget another."""
    Device.capability = (major, minor)
    found = modules()
    utils, quantization = found["transformer_engine.pytorch.utils"], found["transformer_engine.pytorch.quantization"]
    for cached in (utils.is_non_tn_fp8_gemm_supported, utils._get_device_compute_capability):
        cached.cache_clear()
    for kind in ("FP8", "MXFP8", "NVFP4", "FP8_BLOCK_SCALING"):
        setattr(quantization, f"_{kind}_SUPPORT", None)
