"""Functions of tensors run for the shapes of what they return: what a fused kernel would allocate, and no more."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

P = ParamSpec("P")
R = TypeVar("R")


def only_shapes(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` without its work: what it returns is allocated, each tensor once, on its first one's device.

    It runs once, on the meta device, for each set of shapes, dtypes and other arguments.
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
