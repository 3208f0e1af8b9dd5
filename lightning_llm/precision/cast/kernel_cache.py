"""Cache of compiled casts on disk: Dynamo's trace and Inductor's code of a function, one file per kernel.

Inductor's own cache spares only the C++ compiler; most of a second start is Dynamo's tracing, which a loaded kernel
skips. A kernel's name is a hash of everything that shapes it (`software`, `processor`, `signature`), so another torch,
processor or line of source makes another kernel. Kernels are native code: the folder must belong to the user and be
closed to others, and a file is used only if its digest matches.

A missing part of the key could give a wrong kernel; a superfluous part causes a compilation. Sizes are variables of a
kernel, so the key has only the sizes 0 and 1, which Dynamo compiles in; a kernel's guards check its other conditions.
"""

import functools
import io
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from lightning_llm.base import keyed_hash, registry
from lightning_llm.base.folders import user_cache_dir
from lightning_llm.base.integrity import digest_of_file
from lightning_llm.config.schema import cast_kinds, casts, number_formats


@functools.cache
def processor() -> list[str]:
    """Return the model and the instruction-set flags of this CPU: part of the key of a CPU kernel."""
    kept, file = [torch.backends.cpu.get_cpu_capability(), platform.machine()], Path("/proc/cpuinfo")
    if file.is_file():
        names = ("vendor_id", "cpu family", "model\t", "stepping", "flags", "Features", "CPU part")
        kept += sorted({line for line in file.read_text().splitlines() if line.startswith(names)})
    return kept


@functools.cache
def software(device_type: str) -> dict[str, Any]:
    """Return the versions and settings that a kernel for a device type depends on, as JSON data: part of its key."""
    from torch._inductor import config, cpp_builder

    compiler = cpp_builder.get_cpp_compiler()
    found: dict[str, Any] = {
        "sources": _sources(),
        "torch": [torch.__version__, torch.version.git_version, torch.__config__.show()],
        "python": [sys.version, platform.platform()],
        "compiler": [compiler, cpp_builder.get_compiler_version_info(compiler)],
        "inductor": config.get_hash().hex(),  # Dynamo's differs from process to process, and shapes no numbers
    }
    if device_type == "cuda":
        from torch.utils._triton import get_triton_version

        gpu = torch.cuda.get_device_properties(0)
        versions = [torch.version.cuda, torch.version.hip, get_triton_version()]  # machine code: no driver's matter
        found["gpu"] = [str(each) for each in (gpu.name, gpu.major, gpu.minor, gpu.multi_processor_count, *versions)]
    return found


def _sources() -> str:
    """Return a digest of all that Dynamo may trace: `precision`, the schema of casts, random bits, installed kinds."""
    digest = blake2b(digest_size=16)
    package = Path(__file__).parents[1]
    others = [Path(str(module.__file__)) for module in (casts, cast_kinds, number_formats, registry, keyed_hash)]
    for file in [*sorted(package.rglob("*.py")), *others, *_sources_of_installed_kinds()]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _sources_of_installed_kinds() -> list[Path]:
    """Return the Python files of other packages that register kinds of casts, since their functions are traced."""
    modules = {kind.__module__ for each in cast_kinds.REGISTRIES for kind in map(each.__getitem__, each)}
    tops = {sys.modules[name.partition(".")[0]] for name in modules} - {sys.modules["lightning_llm"]}
    found: set[Path] = set()
    for top in tops:
        folders = [Path(each) for each in getattr(top, "__path__", ())]
        found.update(file for folder in folders for file in folder.rglob("*.py"))
        found.update([Path(top.__file__)] if top.__file__ and not folders else [])
    return sorted(found)


def signature(args: tuple[Any, ...]) -> tuple[Hashable, ...]:
    """Return a key of the call with `args`: calls with equal keys share a kernel.

    Its `repr` is the same in all processes.
    """
    return (*map(_described, args), *_surroundings())


def _described(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        sizes = tuple([min(size, 2) for size in value.shape])
        ordered = value.is_contiguous(), value.storage_offset() == 0, value.requires_grad, value.is_inference()
        return (value.device.type, value.dtype, sizes, ordered, type(value).__name__)
    if isinstance(value, tuple):
        return (type(value).__name__, *map(_described, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return min(value, 2) if value >= 0 else "negative"
    return repr(value)


def _surroundings() -> tuple[Hashable, ...]:
    """Return the global torch state that kernels depend on, because stored kernels contain no guards for it."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_enabled("cuda"),
    )


FOLDER = "LIGHTNING_LLM_KERNELS"
"""The environment variable that names another folder than the user's cache folder."""
INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
VARIANTS = 8
"""Kernels per function and kind of call, with different guards; Dynamo compiles calls that fit none."""
SEAL_BYTES = 32


class KernelUnavailable(Exception):
    """Raised if kernels cannot be stored or loaded. An empty message means that the reason was already reported."""


@dataclass
class KernelCounts:
    """Counter of the kernels that this process loaded or compiled since the last report, and of the seconds spent."""

    loaded: int = 0
    compiled: int = 0
    seconds: float = 0.0

    def take(self) -> str | None:
        """Return the counts as text for a report, None if there are none, and reset them."""
        if not self.loaded + self.compiled:
            return None
        text = f"{self.compiled} kernels compiled and {self.loaded} loaded in {self.seconds:.1f} s"
        self.loaded, self.compiled, self.seconds = 0, 0, 0.0
        return text


tally = KernelCounts()


def folder_path() -> Path:
    """Return the path of the kernel folder, which may not exist yet."""
    named = os.environ.get(FOLDER)
    return Path(named).absolute() if named else user_cache_dir() / "kernels"


def clear() -> int:
    """Delete all stored kernels and return their size in bytes. Raises OSError."""
    path = folder_path()
    if not path.is_dir() or path.is_symlink():
        return 0
    size = sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
    shutil.rmtree(path)
    return size


@functools.cache
def folder() -> Path | None:
    """Return the kernel folder, created if needed; None if another user owns it or it is not writable (reported once).

    Inductor's files go there too, unless the user has set another folder: kernels refer to them.
    """
    path = folder_path()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if path.is_symlink() or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise OSError("it must belong to you and be writable only by you, because code is loaded from it")
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        _say(f"{path}: {error.strerror or error}. Casts are compiled for this run alone")
        return None
    # A folder per processor: Inductor builds for the very one it runs on, which its own names do not tell, and a home
    # folder may be shared by machines of several kinds.
    kind = blake2b(repr(processor()).encode(), digest_size=8).hexdigest()
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get(INDUCTOR_FOLDER) in (None, default_cache_dir()):  # which it sets itself when it is imported
        os.environ[INDUCTOR_FOLDER] = str(path / f"inductor-{kind}")
        _remember_probes()
    return path


def _remember_probes() -> None:
    """Let Inductor ask but once for its folder whether this processor runs its vector code: 1.5 CPU seconds a process.

    It asks another Python that loads a library of it; nothing is lost where torch does that in another way one day.
    """
    from torch._inductor.cpu_vec_isa import VecISA

    probe = getattr(VecISA, "_probe_load", None)

    def remembered(isa: Any, library: str) -> bool:
        note = Path(f"{library}.loads")
        if note.exists():
            return True
        loads = bool(probe and probe(isa, library))
        if loads:
            note.touch()
        return loads

    if probe is not None and probe.__name__ != remembered.__name__:
        patched: Any = VecISA
        patched._probe_load = remembered


def _say(text: str) -> None:
    print(f"note   {text}", file=sys.stderr, flush=True)


class Kernels:
    """Kernels of `function`, one per kind of call, cached in memory and on disk.

    `identity`: JSON data, part of their key.

    One of several processes compiles. Meanwhile the others run `function` eagerly, with the same bits, and compile the
    next kernels, so ranks or jobs of a sweep share the work. They wait on a GPU, because eager casts may not fit into
    its memory, and if `waits` is true.
    """

    def __init__(self, identity: Any, function: Callable[..., Any], compiled: Any, waits: bool = False):
        self.identity, self.function, self.compiled, self.waits = identity, function, compiled, waits
        self._held: dict[tuple[Hashable, ...], list[Any]] = {}
        self._given_up = False

    def of(self, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Return a kernel for `args`, loaded or compiled now if needed; None: let Dynamo handle the call."""
        if self._given_up:
            return None
        kind = signature(args)
        held = self._held.setdefault(kind, [])
        for kernel in held:
            if kernel.guard_check(*args):
                return kernel.fn
        started = time.perf_counter()
        try:
            while len(held) < VARIANTS:
                held.append(self._next(repr(kind), len(held), args))
                if held[-1].guard_check(*args):
                    return held[-1].fn
        except Timeout:
            return self.function
        except KernelUnavailable as error:
            self._given_up = True
            if str(error):
                _say(f"a compiled cast is not kept: {error}")
        finally:
            tally.seconds += time.perf_counter() - started
        return None

    def _next(self, kind: str, number: int, args: tuple[Any, ...]) -> Any:
        """Return a kernel, loaded if intact, else compiled for `args` and stored. Raises KernelUnavailable, Timeout."""
        kept = folder()
        if kept is None or not hasattr(torch.compiler, "load_compiled_function"):
            raise KernelUnavailable
        device = next((arg.device.type for arg in args if isinstance(arg, Tensor)), "cpu")
        key = json.dumps([software(device), processor(), self.identity, kind, number]).encode()
        file = kept / f"{blake2b(key, digest_size=16).hexdigest()}.kernel"
        if (kernel := load(file, key)) is not None:
            return kernel
        try:
            with FileLock(f"{file}.lock", timeout=-1 if self.waits or device != "cpu" else 0, mode=0o600):
                kernel = load(file, key) if file.exists() else None
                if kernel is None:
                    kernel = make(file, key, self.compiled, args)
                return kernel
        except Timeout:  # is an OSError
            raise
        except OSError as error:
            raise KernelUnavailable(str(error)) from error


def make(file: Path, key: bytes, compiled: Any, args: tuple[Any, ...]) -> Any:
    """Compile for `args`, write `file` atomically and return the kernel. Raises OSError, KernelUnavailable."""
    import torch._dynamo.config as dynamo_config
    import torch.fx.experimental._config as shapes

    _announce(file.parent)
    shapes_config: Any = shapes  # type checkers do not see its `patch`
    try:
        # Floats are compiled in: tracing would otherwise start again, which this road cannot. Sizes that happen to be
        # equal are no reason to compile for equal ones.
        with dynamo_config.patch(specialize_float=True), shapes_config.patch(use_duck_shape=False):
            kernel = compiled.aot_compile((args, {}))
        with tempfile.TemporaryDirectory(dir=file.parent) as partial:
            saved = Path(partial) / file.name
            kernel.save_compiled_function(str(saved))
            body = json.dumps(_native_files()).encode() + b"\n" + saved.read_bytes()
            with saved.open("wb") as written:
                written.write(_seal(key, body) + body)
                written.flush()
                os.fsync(written.fileno())
            saved.replace(file)
    except OSError:
        raise
    except Exception as error:  # the interface is new: Dynamo compiles rejected functions
        lines = str(error).splitlines() or [""]
        raise KernelUnavailable(f"{type(error).__name__}: {lines[0]}") from error
    tally.compiled += 1
    return kernel


@functools.cache
def _announce(kept: Path) -> None:
    """Report once, on the first rank, that kernels are being compiled, which may take a minute without other output."""
    if os.environ.get("RANK", "0") in ("", "0"):
        _say(f"compiling the casts of this recipe, a few seconds each; they are kept for later runs in {kept}")


def load(file: Path, key: bytes) -> Any | None:
    """Return the kernel in `file`; None if it is missing, damaged or of another key, or a file it names is damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    seal, body = content[:SEAL_BYTES], content[SEAL_BYTES:]
    if seal != _seal(key, body):
        _say(f"{file} is damaged and is built again")
        return None
    names, _, content = body.partition(b"\n")
    if [name for name, digest in json.loads(names).items() if not _is_whole(Path(name), digest)]:
        return None
    try:
        kernel = torch.compiler.load_compiled_function(io.BytesIO(content))
    except Exception as error:  # after any error the kernel is compiled again
        _say(f"{file} cannot be loaded and is built again: {type(error).__name__}: {error}")
        return None
    tally.loaded += 1
    return kernel


def _seal(key: bytes, body: bytes) -> bytes:
    return blake2b(len(key).to_bytes(8, "little") + key + body, digest_size=SEAL_BYTES).digest()


def _native_files() -> dict[str, str]:
    """Return {path: digest} of Inductor's code that this process has loaded, including the code of this kernel."""
    from torch._inductor.codecache import PyCodeCache

    kept = f"{Path(os.environ[INDUCTOR_FOLDER]).absolute()}/"
    modules = [*list(sys.modules.values()), *PyCodeCache.modules]
    names = {name for each in modules if (name := getattr(each, "__file__", None)) and name.startswith(kept)}
    return {name: digest_of_file(Path(name)) for name in sorted(names)}


def _is_whole(file: Path, digest: str) -> bool:
    """Return whether `file` has the recorded digest, or is gone and will be written again; remove it if it differs."""
    if not file.exists() or digest_of_file(file) == digest:
        return True
    _say(f"{file} is damaged and is built again")
    file.unlink()
    return False
