"""Weights rounded to codes of a small number format (FP8, NVFP4, MXFP4, INT4) with scales, as inference engines use.

`export --codes` writes codes and scales in the layout of compressed-tensors, which vLLM and transformers read.
`evaluate --as` measures the model with the rounded weights. Only the weights of linear layers in blocks have codes;
activations stay in 16 bits.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.base.integrity import FileContent
from lightning_llm.config.schema.casts import UNQUANTIZED, CastConfig
from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.config.schema.precision import PrecisionConfig
from lightning_llm.model.interop.families import architecture, stored_as
from lightning_llm.model.structure import experts_by_linear, linear_names, parameter_shapes
from lightning_llm.model.weights.folder import Weights
from lightning_llm.model.weights.write import TensorToWrite, as_huggingface
from lightning_llm.precision.cast.quantize import Quantized, quantize
from lightning_llm.precision.cast.scales import Scaled, divide, scale, tensor_amax
from lightning_llm.precision.module_rules import expert_place, reasons_to_stay_unquantized, rule_in_effect

READ_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears of one input, which engines run as one: they share the scale of a whole tensor."""
INTEGER_SCALE_DTYPE = torch.bfloat16
"""Dtype that engines keep the scales of integer codes in."""
SUFFIX = ".weight"


Coded = tuple[Quantized, Scaled]
"""A quantized weight [N, K] and its scales."""


def _pairs(codes: Tensor) -> Tensor:
    """Return 4-bit codes [N, K] as uint8 [N, K / 2], the first of two in the lower half."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def _eights(values: Tensor) -> Tensor:
    """Return integers [N, K] from -8 to 7 as int32 [N, K / 8]: 4 bits of value + 8 each, the first of eight lowest."""
    nibbles = (values.long() + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    words = nibbles.sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _per_row(coded: Coded, cast: CastConfig) -> Tensor:
    """Return the stored block scales as [N, K / w], those of blocks of h rows repeated."""
    height, rows = int(cast.block.partition("x")[0]), len(coded[0].values)
    return coded[0].stored_scale.repeat_interleave(height, 0)[:rows]


def _of_tensor(scaled: Scaled) -> Tensor:
    """Return the scale of the whole tensor, fp32 [1]."""
    found = scaled.block if scaled.factor is None else scaled.factor
    return torch.ones(1) if found is None else found.reshape(1)


def _nvfp4(coded: Coded, cast: CastConfig) -> dict[str, Tensor]:
    scales = _per_row(coded, cast).to(torch.float8_e4m3fn)
    multiplier = divide(1.0, _of_tensor(coded[1]))  # engines divide by it
    return {"weight_packed": _pairs(coded[0].codes), "weight_scale": scales, "weight_global_scale": multiplier}


def _mxfp4(coded: Coded, cast: CastConfig) -> dict[str, Tensor]:
    return {"weight_packed": _pairs(coded[0].codes), "weight_scale": _per_row(coded, cast).to(torch.uint8)}


def _fp8(coded: Coded, cast: CastConfig) -> dict[str, Tensor]:
    return {"weight": coded[0].codes.view(torch.float8_e4m3fn), "weight_scale": _of_tensor(coded[1])}


def _int4(coded: Coded, cast: CastConfig) -> dict[str, Tensor]:
    values = coded[0].values
    scales = _per_row(coded, cast).to(INTEGER_SCALE_DTYPE)
    return {"weight_packed": _eights(values), "weight_scale": scales, "weight_shape": torch.tensor(values.shape)}


@dataclass(frozen=True)
class CodeFormat:
    """A format of codes of weights: how they are computed, stored and described."""

    name: str
    """Value of `--codes` and `--as`, such as "nvfp4"."""
    layout: str
    """Name of the layout in compressed-tensors' `quantization_config`."""
    scheme: Mapping[str, Any]
    """Entries of `weights` in that config."""
    cast: CastConfig
    """Cast that gives the codes."""
    stored: Callable[[Coded, CastConfig], dict[str, Tensor]]
    """Returns the tensors to store for one linear layer, by the last part of their names."""
    bits: Mapping[str, float]
    """Bits of each of these tensors per element of the weight."""
    narrower: CastConfig | None = None
    """Cast with smaller blocks, used if the blocks of `cast` do not divide the rows of some weight; None: there is
    none."""

    def for_rows(self, lengths: Iterable[int]) -> "CodeFormat":
        """Return this format with blocks that divide rows of all `lengths`: itself, or with the cast `narrower`."""
        if self.narrower is None or all(length % self.width == 0 for length in lengths):
            return self
        narrow = replace(self, cast=self.narrower, narrower=None)
        bits = {**self.bits, "weight_scale": self.bits["weight_scale"] * self.width / narrow.width}
        return replace(narrow, scheme={**self.scheme, "group_size": narrow.width}, bits=bits)

    @property
    def width(self) -> int:
        """Number of elements of a row that share a scale; a row's length must be a multiple. 1 without blocks."""
        return 1 if self.cast.block == "tensor" else int(self.cast.block.partition("x")[2])

    def chosen_cast(self, of_recipe: CastConfig) -> CastConfig:
        """Return the cast to use for a weight: the recipe's if this format can store its results, else the format's
        own.

        So a model that was trained with such codes keeps them bit for bit.
        """
        own = self.cast
        if of_recipe.format != own.format or of_recipe.source != own.source or of_recipe.hadamard is not None:
            return own
        same = of_recipe.block.rpartition("x")[2] == own.block.rpartition("x")[2]
        theirs, ours = of_recipe.scale_kind, own.scale_kind
        same &= (theirs.stored_bits, theirs.shares_exponent) == (ours.stored_bits, ours.shares_exponent)
        same &= of_recipe.amax == own.amax  # the layout has one scale of the whole tensor, not one per row
        changing = of_recipe.stochastic or theirs.from_history or of_recipe.prescale != 1
        return of_recipe if same and not changing else own


_MX = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_NVIDIA = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
CODES = {
    each.name: each
    for each in (
        CodeFormat(
            "nvfp4",
            "nvfp4-pack-quantized",
            _NVIDIA | {"scale_dtype": "torch.float8_e4m3fn"},
            CastConfig(format="e2m1", block="1x16", scale="two_level_e4m3"),
            _nvfp4,
            {"weight_packed": 4, "weight_scale": 8 / 16, "weight_global_scale": 0},
        ),
        CodeFormat(
            "mxfp4",
            "mxfp4-pack-quantized",
            _MX,
            CastConfig(format="e2m1", block="1x32", scale="e8m0_floor"),
            _mxfp4,
            {"weight_packed": 4, "weight_scale": 8 / 32},
        ),
        CodeFormat(
            "fp8",
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            CastConfig(format="e4m3", block="tensor", scale="fp32"),
            _fp8,
            {"weight": 8, "weight_scale": 0},
        ),
        CodeFormat(
            "int4",
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
            CastConfig(format="int4", block="1x128", scale="fp32"),
            _int4,
            {"weight_packed": 4, "weight_scale": 16 / 128, "weight_shape": 0},
            CastConfig(format="int4", block="1x32", scale="fp32"),
        ),
    )
}
"""{name: format} of `--codes` and `--as`; layouts as of compressed-tensors 0.20."""


class CodeWeights(Weights):
    """Weights of which the linear layers in blocks are rounded to codes; they are read as the rounded numbers in
    fp32."""

    def __init__(
        self,
        weights: Weights,
        code_format: CodeFormat,
        recipe: PrecisionConfig | None,
        key: str = "--codes",
    ):
        """Round `weights` to `code_format`.

        Args:
            weights: the weights to round.
            code_format: an entry of `CODES`.
            recipe: precision recipe of the weights' run, None if unknown; layers that it does not quantize get no
                codes.
            key: flag or config key that chose the format, for messages.

        Raises:
            ConfigError: the blocks of the format do not divide the rows of a weight.
        """
        self.weights = weights
        self.kind, self.path, self.config = weights.kind, weights.path, weights.config
        self.architecture, self.notes, self.end_tokens = weights.architecture, weights.notes, weights.end_tokens
        self.matrices = matrices_of(self.config)
        slots = _weight_slots(self.config, recipe)
        lengths = {self.shapes[self.matrices[name].parameter][1] for name in slots}
        self.format = code_format.for_rows(lengths)
        self.casts = {name: self.format.chosen_cast(slot) for name, slot in slots.items()}
        self._by_parameter: dict[str, list[str]] = {}
        for name, matrix in self.matrices.items():
            self._by_parameter.setdefault(matrix.parameter, []).append(name)
        self._last: tuple[str, Coded] | None = None
        if odd := sorted(length for length in lengths if length % self.format.width):
            text = f"has blocks of {self.format.width} inputs, and a linear layer has {odd[0]}. Choose another format."
            raise ConfigError(Problem(key, text, code_format.name))

    def coded(self, name: str) -> Coded:
        """Return the codes and scales of the matrix [N, K] called `name`, which must be in `casts`.

        The last result is cached.
        """
        if self._last is None or self._last[0] != name:
            cast, whole = self.casts[name], self._whole(name)
            amax = self.shared_amax(name) if cast.needs_tensor_amax else None
            self._last = name, (quantize(whole, cast, amax=amax), scale(whole, cast, 1, amax))
        return self._last[1]

    def shared_amax(self, name: str) -> Tensor:
        """Return the largest magnitude in a matrix and in those that engines multiply together with it, fp32 scalar.

        Engines concatenate the weights of `READ_TOGETHER`, also of each expert, so that these need one common scale.
        """
        block, _, leaf = name.rpartition(".")
        together = next((group for group in READ_TOGETHER if leaf in group), (leaf,))
        names = [each for each in (f"{block}.{other}" for other in together) if each in self.casts]
        return torch.stack([tensor_amax(self._whole(each)) for each in names]).amax()

    def _whole(self, name: str) -> Tensor:
        matrix = self.matrices[name]
        return self.weights.rows(matrix.parameter, matrix.first, matrix.last).float()

    def numbers(self, name: str) -> Tensor:
        """Return the rounded numbers [N, K] of the matrix called `name`, fp32."""
        found, _ = self.coded(name)
        if not found.format.integer:
            return found.dequantized
        scales = found.stored_scale.to(INTEGER_SCALE_DTYPE).float()
        return found.values * scales.repeat_interleave(self.format.width, 1)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        own = self._coded_matrices(name)
        if not any(matrix in self.casts for matrix in own):
            return self.weights.rows(name, first, last)
        made = []
        for matrix in own:
            place = self.matrices[matrix]
            start, stop = max(first, place.first), min(last, place.last)
            if start < stop:
                coded = matrix in self.casts
                whole = self.numbers(matrix) if coded else self.weights.rows(name, start, stop).float()
                made.append(whole[start - place.first : stop - place.first] if coded else whole)
        return torch.cat(made) if made else self.weights.rows(name, first, last).float()

    def _coded_matrices(self, name: str) -> list[str]:
        return self._by_parameter.get(name, [])

    def dtype(self, name: str) -> str:
        coded = any(matrix in self.casts for matrix in self._coded_matrices(name))
        return "fp32" if coded else self.weights.dtype(name)

    def files(self) -> "dict[Any, FileContent | None]":
        return self.weights.files()

    def verify(self, rank: int = 0, world: int = 1) -> None:
        self.weights.verify(rank, world)


class Matrix(NamedTuple):
    """Rows `first` to `last` of a parameter: all of a linear's weight, or one expert's part of it."""

    parameter: str
    first: int
    last: int


def matrices_of(config: ModelConfig) -> dict[str, Matrix]:
    """Return the weights of linears by the name of the linear or, one by one, of the expert (`expert_place`)."""
    shapes, experts, found = parameter_shapes(config), experts_by_linear(config), {}
    for name in linear_names(config):
        parameter = f"{name}{SUFFIX}"
        count = experts.get(name, 1)
        rows = shapes[parameter][0] // count
        for number in range(count):
            own = expert_place(name, number) if name in experts else name
            found[own] = Matrix(parameter, number * rows, (number + 1) * rows)
    return found


def _weight_slots(config: ModelConfig, recipe: PrecisionConfig | None) -> dict[str, CastConfig]:
    """Return the recipe's cast of weights by matrix; `UNQUANTIZED` for those in blocks if there is none."""
    names, blocks = list(matrices_of(config)), config.num_layers
    if recipe is None or not recipe.quantizes:
        return {name: UNQUANTIZED for name in names if name.startswith("layers.")}
    reasons = reasons_to_stay_unquantized(names, recipe, blocks)
    quantized = [name for name in names if reasons[name] is None]
    return {name: recipe.casts_under(rule_in_effect(name, recipe, blocks))["fprop.w"] for name in quantized}


def _stored_matrices(weights: CodeWeights) -> dict[str, list[str]]:
    """Return the matrices of each tensor of theirs, which concatenates their rows, by its name."""
    stored, found = stored_as(weights.config, architecture(weights.config)), dict[str, list[str]]()
    for name, matrix in weights.matrices.items():
        if (place := stored.get(matrix.parameter)) is not None:
            ((tensor, _, _),) = place.parts(matrix.first, matrix.last)
            found.setdefault(tensor, []).append(name)
    return found


def as_codes(weights: CodeWeights, dtype: str) -> list[TensorToWrite]:
    """Return all tensors of the exported folder, to be written: codes and scales, and other tensors in `dtype`.

    Raises:
        ConfigError: transformers has no such model, or stores linear layers in another form than [outputs, inputs].
    """
    family = architecture(weights.config)
    if family.transposed:
        text = f"{family.class_name} stores its weights as [inputs, outputs], which compressed-tensors does not read. "
        raise ConfigError(Problem("--codes", text + "Export without --codes.", weights.format.name))
    of_tensors = _stored_matrices(weights)
    parts = {tensor: own for tensor, names in of_tensors.items() if (own := [n for n in names if n in weights.casts])}
    tensors: list[TensorToWrite] = []
    for each in as_huggingface(weights, weights.config, dtype):
        tensors += _coded(weights, each.name, parts[each.name]) if each.name in parts else [each]
    return tensors


def uncoded_modules(weights: CodeWeights) -> list[str]:
    """Return Hugging Face's names of the linear layers without codes, including routers and the head.

    They are the list `ignore` in compressed-tensors' config.
    """
    family = architecture(weights.config)
    stored = stored_as(weights.config, family)
    routers = [place.name for name, place in stored.items() if name.endswith(f".router{SUFFIX}")]
    tensors = _stored_matrices(weights).items()
    names = [tensor for tensor, own in tensors if not any(each in weights.casts for each in own)]
    return sorted({*(name.removesuffix(SUFFIX) for name in (*names, *routers)), family.ends["head"]})


def quantization_entry(weights: CodeWeights) -> dict[str, Any]:
    """Return the entry `quantization_config` of config.json, by which transformers and vLLM recognize the codes."""
    scheme = {**weights.format.scheme, "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": weights.format.layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": {**group, "format": weights.format.layout}},
            "ignore": uncoded_modules(weights),
            "kv_cache_scheme": None,
        }
    }


def _coded(weights: CodeWeights, name: str, ours: list[str]) -> list[TensorToWrite]:
    """Return the tensors of one of their linears, which concatenates the rows of `ours`."""
    base, elements = name.removesuffix("weight"), sum(_elements(weights, each) for each in ours)
    return [
        TensorToWrite(base + part, math.ceil(elements * bits / 8), _Part(weights, ours, part))
        for part, bits in weights.format.bits.items()
    ]


def _elements(weights: CodeWeights, name: str) -> int:
    matrix = weights.matrices[name]
    return (matrix.last - matrix.first) * weights.shapes[matrix.parameter][1]


class _Part:
    """One stored tensor of a linear with codes."""

    def __init__(self, weights: CodeWeights, ours: list[str], part: str):
        self.weights, self.ours, self.part = weights, ours, part

    def __call__(self) -> Tensor:
        form, casts = self.weights.format, self.weights.casts
        found = [form.stored(self.weights.coded(name), casts[name])[self.part] for name in self.ours]
        if self.part == "weight_shape":
            return torch.stack([torch.stack([each[0] for each in found]).sum(), found[0][1]])
        return torch.cat(found) if found[0].ndim == 2 else found[0]  # a scale of the whole tensor is shared
