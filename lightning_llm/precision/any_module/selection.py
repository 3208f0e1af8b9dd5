"""Linear layers of any module: their names, blocks, and the reasons why some cannot be quantized."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_llm.base.errors import ConfigError, Problem, did_you_mean
from lightning_llm.linalg.gemm import CastOnUse

_WRAPPED = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?:\.|$)")
"""Parts of a name that torch.compile, activation checkpointing and FSDP1 add."""
_ADAPTED = re.compile(r"\.base_layer(?=\.|$)")
"""Part of the name of a layer that an adapter wraps, such as a LoRA layer of PEFT."""
INNER = ("module", "_orig_mod")
"""Attributes of the wrapped module in DistributedDataParallel, and in the result of torch.compile."""


def unwrapped(module: nn.Module) -> nn.Module:
    """Return `module` without DistributedDataParallel and torch.compile around it."""
    while True:
        inner = [vars(module)["_modules"].get(name) for name in INNER if list(vars(module)["_modules"]) == [name]]
        if not inner or not _is_wrapper(module):
            return module
        module = inner[0]


def _is_wrapper(module: nn.Module) -> bool:
    return type(module).__module__.startswith(("torch.nn.parallel", "torch._dynamo", "torch.distributed"))


@dataclass(frozen=True)
class FoundLinear:
    """A linear layer `module` and all `names` under which it is registered. The first name keys its random bits."""

    module: Any
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its first name, "" for a module that is itself a linear layer."""
        return self.names[0]

    @property
    def is_transposed(self) -> bool:
        """Whether its weight is [in_features, out_features]: the Conv1D of transformers."""
        return is_conv1d(self.module)

    @property
    def in_features(self) -> int:
        """Number of input features."""
        return int(self.module.weight.shape[0] if self.is_transposed else self.module.in_features)

    @property
    def out_features(self) -> int:
        """Number of output features."""
        return int(self.module.weight.shape[1] if self.is_transposed else self.module.out_features)


def is_conv1d(module: nn.Module) -> bool:
    """Whether `module` is the Conv1D of transformers (GPT-2): a linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def linears_in(module: nn.Module) -> list[FoundLinear]:
    """Return the linear layers of `module`, in the order of its submodules, each once."""
    found: dict[int, FoundLinear] = {}
    every = [
        (plain_name(path), each)
        for path, each in module.named_modules(remove_duplicate=False)
        if isinstance(each, nn.Linear) or is_conv1d(each)
    ]
    paths = {path for path, _ in every}
    for path, each in every:
        without = _ADAPTED.sub("", path)  # the name that the layer has without the adapter, unless that is linear, too
        names = found[id(each)].names if id(each) in found else ()
        own = (path,) if without in paths else (without, path)
        found[id(each)] = FoundLinear(each, tuple(dict.fromkeys((*names, *own))))
    return list(found.values())


def plain_name(path: str) -> str:
    """Return a module's name without the parts that wrappers add (torch.compile, checkpointing, FSDP, adapters)."""
    return _WRAPPED.sub("", path).rstrip(".")


def why_not_convertible(linear: FoundLinear, root: nn.Module) -> str | None:
    """Return why `linear` cannot be quantized, e.g. a lazy or quantized layer; None if it can."""
    module = linear.module
    weight = module.weight
    if is_lazy(weight):
        return "its weight is created by the first forward pass; quantize the module after that"
    if type(module).__name__ == "NonDynamicallyQuantizableLinear":
        return "nn.MultiheadAttention reads its weight and never calls it"
    if (kind := _plain_class(module)) is not nn.Linear and not issubclass(kind, CastOnUse) and not is_conv1d(module):
        return f"{kind.__module__}.{kind.__qualname__} is a subclass of Linear with a forward pass of its own"
    if "forward" in vars(module):
        return "its forward method was replaced on the instance (by hooks of accelerate, for example)"
    if not weight.is_floating_point():
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}: quantized by other code"
    if isinstance(weight, DTensor):
        return None if _only_fsdp_shards(weight, root) else "its weight is a DTensor of tensor parallelism"
    if not isinstance(weight, nn.Parameter) and type(weight) is not Tensor:
        return f"its weight is a {type(weight).__name__}"
    return None if type(weight.data) is Tensor else f"its weight is a {type(weight.data).__name__}"


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the module's class, without the one that FSDP2 derives from it."""
    kind = type(module)
    if not isinstance(module, FSDPModule):
        return kind
    return next(each for each in kind.__mro__[1:] if issubclass(each, nn.Module) and not issubclass(each, FSDPModule))


def _only_fsdp_shards(weight: DTensor, root: nn.Module) -> bool:
    """Whether FSDP2 alone shards `weight`: its module then sees the whole weight in the forward pass."""
    sharded = [each for each in weight.placements if each.is_shard()]
    return len(sharded) <= 1 and any(isinstance(each, FSDPModule) for each in root.modules())


@dataclass(frozen=True)
class Blocks:
    """The transformer blocks of a module: paths of their containers, and the number of blocks in each.

    Without a container (`paths` is empty) all linear layers may be quantized, and rules for first and last blocks do
    not apply.
    """

    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    keys: tuple[tuple[str, ...], ...]

    @property
    def count(self) -> int:
        """Number of blocks, one without a container."""
        return sum(self.sizes) or 1

    def canonical(self, name: str) -> str | None:
        """Return `name` as "layers.INDEX.REST", as rules of a recipe see it; None outside of the blocks."""
        if not self.paths:
            return f"layers.0.{name}"
        before = 0
        for path, size, keys in zip(self.paths, self.sizes, self.keys, strict=True):
            if name.startswith(f"{path}." if path else ""):
                key, _, rest = name[len(path) + 1 if path else 0 :].partition(".")
                if key in keys:
                    return f"layers.{before + keys.index(key)}.{rest}".rstrip(".")
            before += size
        return None

    @property
    def text(self) -> str:
        """Text on the place of the blocks, e.g. "model.layers (12 blocks)"."""
        if not self.paths:
            return "none (there is no ModuleList)"
        named = (f"{path or 'the module itself'} ({size})" for path, size in zip(self.paths, self.sizes, strict=True))
        return ", ".join(named)


def blocks_in(root: nn.Module, named: str | Sequence[str] | None) -> Blocks:
    """Return the blocks of `root`: those of the containers `named`, or of its longest ModuleList.

    Lists within a block (experts, heads) do not count, nor do lists without linear layers. A ModuleDict with numbers
    as keys counts as a list. Raises ConfigError for a name of no container, containers that overlap, and several
    longest lists.
    """
    if named is not None:
        return _of_containers(_apart([_named(root, path) for path in ([named] if isinstance(named, str) else named)]))
    found = list(_outermost(root, ""))
    longest = max((len(each) for _, each in found), default=0)
    best = [(path, each) for path, each in found if len(each) == longest]
    if len(best) > 1:
        paths = [path for path, _ in best]
        text = f"{' and '.join(paths)} have {longest} blocks each. Name one, or all in order: blocks={paths!r}."
        raise ConfigError(Problem("blocks", text))
    return _of_containers(best)


def _of_containers(found: list[tuple[str, Any]]) -> Blocks:
    keys = tuple(tuple(each._modules) for _, each in found)
    return Blocks(tuple(path for path, _ in found), tuple(len(each) for each in keys), keys)


def _named(root: nn.Module, path: str) -> tuple[str, nn.Module]:
    containers = {plain_name(name): each for name, each in root.named_modules() if _is_container(each)}
    if path not in containers:
        text = f"is no ModuleList, ModuleDict or Sequential of this module.{did_you_mean(path, containers)}"
        raise ConfigError(Problem("blocks", text, path))
    return path, containers[path]


def _apart(found: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the containers. Raises ConfigError for none of them, or one that is named twice or within another."""
    if not found:
        raise ConfigError(Problem("blocks", "must name at least one container, or be left out.", []))
    for at, (path, module) in enumerate(found):
        for other, outer in found[:at] + found[at + 1 :]:
            if outer is module or any(each is module for each in outer.modules()):
                text = f"{path or 'the module itself'} is within {other or 'the module itself'}. Name each block once."
                raise ConfigError(Problem("blocks", text, [each for each, _ in found]))
    return found


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _outermost(module: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    numbered = isinstance(module, nn.ModuleDict) and len(module) > 0 and all(key.isdecimal() for key in module)
    if (numbered or isinstance(module, nn.ModuleList)) and linears_in(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost(child, plain_name(f"{path}.{name}" if path else name))
