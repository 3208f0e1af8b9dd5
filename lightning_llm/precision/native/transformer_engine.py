"""Linears in Transformer Engine 2.20: the only file that imports it, and only if a linear runs natively.

Differences from its usual use, with reasons:

- Weights are our masters in the recipe's dtype. As in the emulation, they are cast once to the activations' dtype
  before Transformer Engine gets them; by default it would quantize the fp32 weight directly, with other results. Under
  FSDP2 the gathered weight already has that dtype.
- The kernel object is not a submodule: it owns no parameter, and its extra state is in no checkpoint.
- Every argument that an environment variable (NVTE_...) gives a default is passed, so that none changes a recipe.
- Delayed scales are stored in the layer as in the emulation: the kernels read the scale and merge the amax in
  place, and `update_delayed` rolls the history when the recipe requires. Transformer Engine's DelayedScaling rolls at
  the end of every autocast and takes the maximum over the whole job.
- Under tensor and context parallelism a rank casts its part of an operand. If the scale belongs to the whole, the
  quantizer takes the maximum of the amaxes over a group of ranks (`share_amaxes`). Transformer Engine's own linear does
  that only for tensors that it gathers itself.
- Stochastic rounding draws from torch's CUDA generator, which is seeded before each cast of dY, from the layer's key
  and the number of the rank's part: so bits do not depend on the order of backward passes, parts have different bits,
  and ranks that hold the same tensor round it alike.
- GEMMs of FP8 with a scale per tensor or per 128 accumulate in full fp32 (`use_split_accumulator`); its default for
  fprop of per-tensor FP8 has about 14 bits in a sum. MXFP8's and NVFP4's recipes have no such switch: the library
  calls their fprop GEMM without it and their backward GEMMs with it (`_2X_ACC_FPROP`, ...); fast accumulation exists
  only on Hopper.
"""

import functools
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_llm.base.keyed_hash import hash_words
from lightning_llm.config.schema.number_formats import NUMBER_FORMATS
from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.precision.linear.module import QuantizedLinear
from lightning_llm.precision.linear.operands import observe_casts
from lightning_llm.precision.linear.plan import ROLES, SLOT_NAMES, LinearPlan, WeightCasts
from lightning_llm.precision.linear.weight_rules import kept_by_kernel
from lightning_llm.precision.native.express import MULTIPLES, NativeRecipe, express
from lightning_llm.precision.native.main_grad import MainGrad

ROLE_OF = {"input": "x", "weight": "w", "grad_output": "dy"}
"""Transformer Engine's `QuantizerRole.tensor_type`, and the tensor's name here."""


class Engine(NamedTuple):
    """The modules of Transformer Engine that are used."""

    pytorch: Any
    recipe: Any
    delayed_quantizer: Any
    formats: dict[str, Any]
    bias_gradient_and_cast: Any
    split_and_cast: Any


@functools.cache
def engine() -> Engine:
    """Import Transformer Engine, after torch, which loads the CUDA libraries that it needs; return its modules."""
    with suppress(RuntimeError):  # torch loads its own cuDNN now, or the library's would make torch refuse to use any
        torch.backends.cudnn.version()
    import transformer_engine.pytorch as pytorch
    import transformer_engine_torch as extension
    from transformer_engine.common import recipe
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    named = {row.name: row.engine_dtype for row in NUMBER_FORMATS.values() if row.engine_dtype is not None}
    formats = {name: getattr(extension.DType, dtype) for name, dtype in named.items()}
    return Engine(pytorch, recipe, Float8Quantizer, formats, extension.bgrad_quantize, extension.split_quantize)


def import_problem() -> str | None:
    """Return why Transformer Engine cannot be used although it is installed; None if it can."""
    if os.environ.get("NVTE_USE_FAST_MATH", "0") not in ("", "0"):
        return "NVTE_USE_FAST_MATH changes how Transformer Engine quantises: unset it"
    try:
        engine()
    except Exception as error:  # RuntimeError, OSError, FileNotFoundError: raised if CUDA libraries are missing
        first = (str(error).strip().splitlines() or [""])[0]
        return f"Transformer Engine cannot be imported here ({type(error).__name__}: {first})"
    return None


def recipe_object(native: NativeRecipe) -> Any:
    """Return Transformer Engine's recipe object for `native`, with every option set explicitly."""
    own, e = engine().recipe, native
    common = {"backward_override": "high_precision" if e.gradient == "high" else None}
    wide = own.Format.HYBRID if e.gradient == "e5m2" else own.Format.E4M3
    split = dict.fromkeys(("fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad"), own.MMParams(True))
    if e.kind == "current":
        made = own.Float8CurrentScaling(use_power_2_scales=e.power_of_two, fp8_format=wide, **split, **common)
        return _with_scales(made, e.power_of_two)
    if e.kind == "subchannel":
        blocks = {"x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1}
        made = own.Float8BlockScaling(use_f32_scales=not e.power_of_two, fp8_format=wide, **blocks, **split, **common)
        return _with_scales(made, e.power_of_two)
    if e.kind == "mxfp8":
        return own.MXFP8BlockScaling(fp8_format=wide, enable_2d_quantization=e.square, **common)
    if e.kind == "nvfp4":
        return own.NVFP4BlockScaling(
            disable_rht=not e.rotated,
            disable_stochastic_rounding=not e.stochastic,
            disable_2d_quantization=not e.square,
            row_scaled_activation=False,
            nvfp4_4over6="none",
            **common,
        )
    raise ValueError(f"{e.kind} has no recipe object")


def _with_scales(recipe: Any, power_of_two: bool) -> Any:
    """Set how scales round, on the instance: as an argument of the constructor it is taken and does nothing."""
    scales = engine().recipe.QParams(power_2_scale=power_of_two, amax_epsilon=0.0)
    recipe.fp8_quant_fwd_inp = recipe.fp8_quant_fwd_weight = recipe.fp8_quant_bwd_grad = scales
    return recipe


class DelayedQuantizers:
    """Quantizers of one layer with delayed scaling. They read scales and write amaxes that the layer owns."""

    def __init__(self, casts: dict[str, CastConfig], device: torch.device):
        """`casts`: {role (x, w, dy): cast}."""
        parts = engine()
        self.scratch = torch.zeros(len(ROLES), device=device)  # what amaxes go to that no history is to see
        ones = torch.ones(len(ROLES), device=device)
        self.by_role = {
            role: parts.delayed_quantizer(ones[at], self.scratch[at : at + 1], parts.formats[casts[role].format])
            for at, role in enumerate(ROLES)
        }
        self._spare = parts.delayed_quantizer(ones[0], self.scratch[:1], parts.formats["e4m3"])
        self.recipe = parts.recipe.CustomRecipe(
            qfactory=self._quantizer, fp8_format=parts.recipe.Format.HYBRID, backward_override=None
        )
        for gemm in ("fprop", "dgrad", "wgrad"):
            setattr(self.recipe, f"fp8_gemm_{gemm}", parts.recipe.MMParams(True))

    def _quantizer(self, role: Any) -> Any:
        """Return the quantizer of a slot; of outputs and input gradients, which are never quantized, one to spare."""
        return self.by_role.get(ROLE_OF.get(getattr(role, "tensor_type", ""), ""), self._spare)

    def use(self, scale: Tensor, amax: Tensor | None) -> None:
        """Set the tensors to use: `scale` [len(ROLES)] to read, `amax` [len(ROLES)] to merge amaxes into, or None.

        Called for each forward pass, and again for its backward pass, because others may have run in between.
        """
        target = self.scratch if amax is None else amax
        for at, role in enumerate(ROLES):
            quantizer = self.by_role[role]
            quantizer.scale, quantizer.amax = scale[at], target[at : at + 1]


class KeptByKernel(WeightCasts):
    """Casts of the weight of `layer` that its kernel keeps within a training step (`is_first_microbatch`)."""

    def __init__(self, layer: "NativeLinear"):
        super().__init__()
        self.layer = layer

    def begin_step(self) -> None:
        """Begin a training step with an empty cache."""
        self.end_step()
        super().begin_step()

    def end_step(self) -> None:
        """Drop the cached operands."""
        super().end_step()
        self.layer.let_go()


class NativeLinear(QuantizedLinear):
    """Linear layer with GEMMs in Transformer Engine.

    Parameters, names and delayed state are those of `QuantizedLinear`.

    Each call enters autocast, so that recomputations in the backward pass, samples and validations use it too; the
    recipes in use keep no state in it.
    """

    def __init__(self, name: str, linear: nn.Linear, plan: LinearPlan, sharded: bool = False):
        """`sharded`: the weight is gathered for each use, so no quantized copy is kept for the backward pass."""
        super().__init__(name, linear, plan)
        self.sharded = sharded

    def _start(self, name: str, plan: LinearPlan, place: str | None = None) -> None:
        super()._start(name, plan, place)
        self.sharded = False
        self._kernel: tuple[Any, ...] = ()  # one, in a tuple so that it is no submodule
        self._known: LinearPlan | None = None
        self._native: NativeRecipe | None = None
        self._recipe: Any = None
        self._delayed: DelayedQuantizers | None = None
        self.groups: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        own: dict[str, Any] = {"_kernel": (), "groups": {}}  # a copy makes its own kernel
        own |= dict.fromkeys(("_known", "_native", "_recipe", "_delayed"))
        return super().__getstate__() | own

    def keep_weight_casts(self, rotated: bool) -> None:
        """Cache the kernel's casts of the weight within each training step, where they have the same bits."""
        self.plan = self.plan.with_weight_casts(KeptByKernel(self))

    def let_go(self) -> None:
        """Drop the kernel's cached casts of the weight."""
        for kernel in self._kernel:
            kernel._fp8_workspaces.clear()

    @torch.compiler.disable  # a compiled block runs it as it is
    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x weight^T + bias, [..., N] in the dtype of `x` [..., K], for a weight [N, K] or a rank's part of one.

        The GEMM adds the bias to its fp32 sums, in the dtype of `x`, and the bias's gradient is the sum of dY before it
        is cast, as in the emulation.
        """
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
            with torch.autocast(device, enabled=False):
                return self.multiply(x, weight, bias)
        bias = None if bias is None else bias.to(x.dtype)
        self._follow_plan(x.device)
        if self.bypass or self._native is None:
            return self._without_casts(x, weight, bias)
        if self._delayed is not None:
            self.materialise_state(x.device)
            if self.scale is None or self.amax_history is None:
                raise RuntimeError(f"{self.name} has no delayed state")
            recording = self.training and torch.is_grad_enabled()
            scales = self.scale, self.amax_history[0] if recording else None
            self._delayed.use(*scales)
        rows = x.reshape(-1, x.shape[-1])  # [M, K]
        # Zero rows change no scale and no product, and the emulation pads its blocks with them too.
        padding = -rows.shape[0] % MULTIPLES[self._native.kind]
        product = self._run(F.pad(rows, (0, 0, 0, padding)) if padding else rows, weight, bias)  # [M + padding, N]
        if product.requires_grad:
            if self._delayed is not None:
                delayed = self._delayed
                product.register_hook(lambda _: delayed.use(*scales))
            self._before_backward(product)
        if padding:  # even of all rows, a slice's gradient is a copy into zeros
            product = product[: rows.shape[0]]
        y = product.reshape(*x.shape[:-1], weight.shape[0])
        if self.observe is not None:  # kernels do not return their casts
            plan = replace(self.plan, observe=self.observe)
            observe_casts(rows, weight, y, plan, self._keys_on(x.device), self.scale)
        return y

    def _before_backward(self, product: Tensor) -> None:
        """Prepare the casts of the backward pass of `product` just before it: others may come in between."""
        if self.groups:
            kernel = self._kernel[0]
            product.register_hook(lambda _: share_amaxes(kernel, self.groups))
        if self._native is not None and self._native.stochastic:
            word = self.random_word()
            product.register_hook(lambda _: seed_random_bits(word))
        if self.clock is not None:
            clock = self.clock
            product.register_hook(lambda _: clock.backward_runs())

    @property
    def keys_device(self) -> torch.device:
        """The CPU, which seeds the kernels' generator without waiting for the GPU."""
        return torch.device("cpu")

    def random_word(self) -> int:
        """Return the seed of the random bits that round dY in this micro-batch, for this rank's part.

        Raises ValueError if no key was set.
        """
        if self.keys is None:
            raise ValueError(f"stochastic rounding of {self.name} needs a key; none was set for this step")
        part = self.plan.shards["dy"].part if "dy" in self.plan.shards else 0
        return hash_words(int(self.keys[SLOT_NAMES.index("dgrad.dy")]), part)

    def _run(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._kernel:
            self._kernel = (self._new_kernel(weight.shape, bias is not None),)
        kernel = self._kernel[0]
        cast = weight.to(rows.dtype) if self.plan.wgrad_dtype is None else MainGrad.cast(weight, rows.dtype)
        own = {"weight": cast} | ({} if bias is None else {"bias": bias})
        kernel.__dict__.update(own)
        try:
            with engine().pytorch.autocast(enabled=True, recipe=self._recipe):
                if self.groups:
                    kernel.init_fp8_metadata()  # makes the quantizers, which the first call would do
                    share_amaxes(kernel, self.groups)
                y: Tensor = kernel(rows, is_first_microbatch=self._is_first_micro_batch(kernel))
        finally:
            for name in own:
                del kernel.__dict__[name]
            MainGrad.let_go(cast)
        return y

    def _is_first_micro_batch(self, kernel: Any) -> bool | None:
        """Return whether the kernel is to cast the weight and keep that, or has it; None: cast it, and keep nothing."""
        source = self.plan.weight_casts
        if not isinstance(source, KeptByKernel) or not source.in_step or not kept_by_kernel(self.plan.casts):
            return None
        return not kernel._fp8_workspaces

    def _follow_plan(self, device: torch.device) -> None:
        """Take up another plan: at the first call, and where a phase begins. A kernel keeps its first quantizers."""
        if self._known is self.plan:
            return
        self._known = self.plan
        self._native = self._recipe = self._delayed = None
        self._kernel, self.groups = (), {}
        if not any(cast.quantizes for cast in self.plan.casts.values()):
            return
        self._native, differences = express(self.plan.casts)
        if self._native is None:
            raise ValueError(f"{self.name}: {'; '.join(f'{slot} {text}' for slot, text in differences)}")
        if self._native.whole_tensors:
            groups = {role: shard.group for role, shard in self.plan.shards.items() if shard.group is not None}
            scopes = dict(zip(ROLES, self._native.scopes, strict=True))
            self.groups = {role: group for role, group in groups.items() if scopes[role] == "logical"}
        if self._native.kind == "delayed":
            self._delayed = DelayedQuantizers(self.plan.delayed_casts(), device)
            self._recipe = self._delayed.recipe
        else:
            self._recipe = recipe_object(self._native)

    def _new_kernel(self, shape: torch.Size, bias: bool) -> Any:
        """Return one for a weight of `shape` [N, K], which may be a rank's part: the groups of ranks are not its."""
        kernel = engine().pytorch.Linear(
            shape[1],
            shape[0],
            bias=bias,
            params_dtype=torch.bfloat16,
            device="meta",
            name=self.name,
            fuse_wgrad_accumulation=self.plan.wgrad_dtype is not None,
        )
        del kernel.weight  # ours is put in its place for each call
        if bias:
            del kernel.bias
        kernel._is_fsdp2 = self.sharded  # it would look for itself among the model's modules
        return kernel


def quantizers_of(kernel: Any) -> dict[str, Any]:
    """Return the quantizers of X, W and dY of one of the library's linears, by role."""
    forward, backward = kernel.quantizers["scaling_fwd"], kernel.quantizers["scaling_bwd"]
    return {"x": forward[0], "w": forward[1], "dy": backward[0]}


def share_amaxes(kernel: Any, groups: Mapping[str, Any]) -> None:
    """Make the next cast of each quantizer of `kernel` reduce its amax over a process group (`groups`, by role).

    The library withdraws the group after every cast (`Quantizer.quantize`), and before casts of tensors that it does
    not gather itself: unless the quantizer names another as its parent, as the debug tools' do (`module/_common.py`).
    The check at the start of a run casts through this path and compares products, so a release that does otherwise is
    found there (`codes.cast_differences`).
    """
    for role, quantizer in quantizers_of(kernel).items():
        if role in groups:
            quantizer.parent_quantizer = None
            quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, groups[role]


def seed_random_bits(word: int) -> None:
    """Seed torch's CUDA generator, from which NVFP4 kernels draw the bits of stochastic rounding, before a cast."""
    torch.cuda.manual_seed(word)
