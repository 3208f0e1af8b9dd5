"""Casts compiled by Inductor: fused C++ on CPU, Triton on CUDA, the same bits as eager.

Inductor must round where the code rounds (`emulate_precision_casts`): otherwise `x.to(bf16).float()` compiles to
nothing, which removes the emulated rounding. It also keeps Triton from contracting products and sums.
"""

import functools
import itertools
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.precision.cast import quantize, scales
from lightning_llm.precision.cast.kernel_cache import Kernels
from lightning_llm.precision.cast.quantize import CastBlocks, Operand
from lightning_llm.precision.cast.random_bits import Origin
from lightning_llm.precision.cast.scales import BlockShape, Scaled, block_shape, blocked, per_block, unblocked

OPTIONS: dict[str, Any] = {"emulate_precision_casts": True}
if torch.__version__ < TorchVersion("2.13"):
    # There Inductor's pattern matcher removes fp32 -> bf16 -> fp32 despite the option above.
    OPTIONS["pattern_matcher"] = False
P = ParamSpec("P")
R = TypeVar("R")
Backend = Literal["eager", "compiled", "shapes"]
"""Ways to run casts; "shapes": not at all, their results are allocated but not computed (see `only_shapes`)."""


# Said of a cast that reads fp16 and gives codes in bf16. All between is fp32, and its bits are those of eager (tests).
warnings.filterwarnings("ignore", message="bf16 and fp16 are mixed in the scheduler node")


@functools.cache
def no_compiler(device_type: str) -> str | None:
    """Return why there is no compiler for a device type ("cpu", "cuda"); None if one is installed.

    An installed compiler may still fail, see `why_not`.
    """
    if device_type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton is not installed"
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError) as error:
        return f"no C++ compiler was found ({_first_error(error)})"
    return None


@functools.cache
def why_not(device_type: str) -> str | None:
    """Return why casts cannot be compiled for a device type ("cpu", "cuda"); None if compiling a small cast succeeded.

    The trial pays costs that the first cast would otherwise pay: loading Inductor and precompiling torch's headers. Its
    kernel goes through the same kernel cache as casts, so a cached kernel is checked, too.
    """
    reason = no_compiler(device_type)
    if reason is not None:
        return reason
    probe = 1 + 2.0**-12 * torch.arange(1024, device=device_type).reshape(2, -1)
    try:
        wrong = (_kept(_trial, "trial", waits=True)(probe) != _trial(probe)).sum((1, 2)).tolist()
    except Exception as error:  # a broken toolchain may raise any type; the reason is returned
        return f"the compiler fails ({_first_error(error)})"
    if not any(wrong):
        return None
    return f"compiled code is not eager's bits (of {probe.numel()}, {wrong[0]} bf16 roundings and {wrong[1]} quotients)"


def _trial(x: Tensor) -> Tensor:
    """Return [2, *x.shape]: operations that a compiler in a fast mode may omit or approximate."""
    return torch.stack([x.to(torch.bfloat16).float(), scales.divide(1.0, x)])


def _first_error(error: Exception) -> str:
    """Return the line of a compiler's message with the error, or else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if "error: " in line), lines[0])


_numbers = itertools.count()


def compiled(function: Callable[P, R], identity: Any = None) -> Callable[P, R]:
    """Return `function` compiled by torch.compile as one graph with dynamic shapes.

    It is compiled at its first call, which raises ConfigError if that fails. `identity`: JSON data that names the
    function and all values that it closes over; it is the key of the kernels on disk. None: kernels are not stored.
    """
    inner = _compile(function) if identity is None else _kept(function, identity)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return inner(*args, **kwargs)
        except BackendCompilerFailed as error:
            text = f"compiling '{function.__name__}' failed: {_first_error(error)}. Fix that, or set"
            raise ConfigError(
                Problem("precision.casts", f"{text} precision.casts=eager, which is slower and gives the same bits.")
            ) from error

    return call


def _compile(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` compiled whole under a unique name.

    Dynamo counts recompilations per code object, which closures of one line share: each gets a copy.
    """
    if not isinstance(function, FunctionType):
        raise TypeError(f"only Python functions can be compiled, not {function!r}")
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    own = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    with torch._dynamo.config.patch(enable_aot_compile=True):  # torch 2.11's default is off
        compiled_function: Callable[P, R] = torch.compile(own, dynamic=True, fullgraph=True, options=OPTIONS)
    return compiled_function


def _kept(function: Callable[P, R], identity: Any, waits: bool = False) -> Callable[P, R]:
    """Return `function` compiled, by a kernel that is kept where there can be one; `waits`: see `Kernels`."""
    inner = _compile(function)
    kernels = Kernels(identity, function, inner, waits)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        kernel = None if kwargs else kernels.of(args)
        made: R = inner(*args, **kwargs) if kernel is None else kernel(*args)
        return made

    return call


def run_by(backend: Backend, function: Callable[P, R], identity: Any) -> Callable[P, R]:
    """Return `function` itself for the backend "eager", or `compiled(function, identity)` for "compiled"."""
    if backend == "eager":
        return function
    return compiled(function, identity) if backend == "compiled" else only_shapes(function)


def only_shapes(function: Callable[P, R]) -> Callable[P, R]:
    """Return a stand-in for `function` that computes nothing: it returns uninitialized results of the same shapes.

    `function` runs once, on the meta device, for each set of shapes, dtypes and other arguments.
    """
    returned: dict[Any, tuple[list[Any], Any]] = {}

    @functools.wraps(function)
    def allocate(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = (structure, *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves))
        if key not in returned:
            meta_args, meta_kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs))
            with torch.device("meta"):
                returned[key] = tree_flatten(function(*meta_args, **meta_kwargs))
        made, layout = returned[key]
        device = tensors[0].device
        fresh = {
            id(leaf): torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
            for leaf in made
            if isinstance(leaf, Tensor)
        }
        result: R = tree_unflatten([fresh.get(id(leaf), leaf) for leaf in made], layout)
        return result

    return allocate


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")


@functools.cache
def tensor_amax(backend: Backend) -> Callable[[Tensor], Tensor]:
    """Return `scales.tensor_amax` (x -> its largest magnitude, an fp32 scalar), eager or compiled by `backend`."""
    return run_by(backend, scales.tensor_amax, "tensor_amax")


CastFunction = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None, Origin], CastBlocks]
"""Of blocks, the tensor's amax, the delayed multiplier, the key of random bits, and the origin."""


class Cast(NamedTuple):
    """A cast for one contraction axis: the function that computes it, and its block shape."""

    function: CastFunction
    shape: BlockShape


@functools.cache
def cast_by(cast: CastConfig, axis: int, backend: Backend, wide: bool = False) -> Cast:
    """Return the function that computes `cast` with blocks along `axis`.

    `wide`: its operand is fp32 instead of bf16.
    """
    shape = block_shape(cast.block, axis)
    return Cast(_cast_function(quantize.read_by_cast(cast), shape, backend, wide), shape)


@functools.cache
def _cast_function(cast: CastConfig, shape: BlockShape, backend: Backend, wide: bool) -> CastFunction:
    """Square blocks, and whole tensors, have no direction: one function serves both."""

    # Bound by defaults of a function that is called: Dynamo (torch 2.13) compiles their numbers in. Those of a closure
    # are variables of a kernel, and to shift by one (`noise_bits`) takes as long as all the rest.
    def whole(
        blocks: Tensor,
        amax: Tensor | None,
        delayed: Tensor | None,
        key: Tensor | None,
        origin: Origin,
        cast: CastConfig = cast,
        shape: BlockShape = shape,
    ) -> CastBlocks:
        return quantize.cast_blocks(blocks, cast, shape, amax, delayed, key, origin, wide)

    def cast_blocks(
        blocks: Tensor, amax: Tensor | None, delayed: Tensor | None, key: Tensor | None, origin: Origin
    ) -> CastBlocks:
        return whole(blocks, amax, delayed, key, origin)

    return run_by(backend, cast_blocks, ["cast_blocks", cast.model_dump(mode="json"), shape, wide])


@functools.cache
def grid_values(cast: CastConfig, backend: Backend) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function (x [R, C], multiplier) -> x * multiplier, rounded to the numbers of the format of `cast`."""
    return _grid_values(quantize.read_by_cast(cast), backend)


@functools.cache
def _grid_values(cast: CastConfig, backend: Backend) -> Callable[[Tensor, Tensor], Tensor]:
    def values(x: Tensor, multiplier: Tensor) -> Tensor:
        return quantize.round_blocks(x, cast, None, multiplier, None)[0]

    return run_by(backend, values, ["grid_values", cast.model_dump(mode="json")])


def operand(
    x: Tensor,
    cast: CastConfig,
    axis: int,
    backend: Backend,
    *,
    key: Tensor | None = None,
    origin: Origin = Origin(),  # noqa: B008  (immutable)
    delayed: Tensor | None = None,
    wide: bool = False,
    reduce_amax: Callable[[Tensor], Tensor] | None = None,
    observe: Callable[[Tensor, Scaled, Operand], None] | None = None,
) -> Operand:
    """Quantize `x` [R, C] by `cast` along the contraction `axis` and return it as an operand of a GEMM.

    `key`, `origin`: for stochastic rounding. `delayed`: the stored multiplier. `wide`: the operand is fp32, with the
    same numbers. `reduce_amax` replaces the tensor-level amax by its maximum over the ranks that share the tensor.
    `observe` receives the rounded tensor, the scales and the result.
    """
    x, amax = x.detach(), None
    if reduce_amax is not None and cast.needs_tensor_amax:
        amax = reduce_amax(tensor_amax(backend)(x))
    delayed = delayed if cast.scale_kind.from_history else None
    if cast.stochastic:  # rows are as long as those of the whole tensor, not as the padded blocks
        origin = origin if origin.row_stride else origin._replace(row_stride=x.shape[1])
    else:
        key, origin = None, Origin()
    function, shape = cast_by(cast, axis, backend, wide)
    made = function(blocked(x, shape), amax, delayed, key, origin)
    multiplier = delayed if made.multiplier is None else made.multiplier
    if multiplier is None:
        raise ValueError(f"scale: {cast.scale} needs the scale kept from earlier steps")
    scaled = Scaled(multiplier, made.block, made.tensor)
    blocks = None
    if made.block is not None and cast.scales_partial_sums:
        blocks = quantize.contraction_scales(made.block, cast, axis, x)
    inside = None if made.inside is None else unblocked(made.inside, x, shape)
    factor = made.tensor
    if factor is not None and factor.dim() > 0 and shape is not None:  # one of each row
        factor = per_block(factor, shape)
    result = Operand(unblocked(made.operand, x, shape), factor, inside, blocks)
    if observe is not None:
        observe(x, scaled, result)
    return result
