"""Counters of one rank's step, updated as operations run: memory, bytes sent, collectives, host waits.

They work on fake tensors (`torch._subclasses.FakeTensorMode`), which have no values: a value that the host reads is
1.0, 0 or False unless it follows from constants, and a single integer received from another rank is 1, a vote in favor.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor, _sharding_prop
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_llm.base.errors import ConfigError, Problem
from lightning_llm.parallel.torch_private import private
from lightning_llm.train.step import READ_NUMBERS

_KINDS = {
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "send": "send",
}
_FUNCTIONAL = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


class SentBytes:
    """Counter of collectives: bytes that this rank sends, as in a ring, and calls, by (kind of collective, ranks)."""

    def __init__(self, small_bytes: int) -> None:
        self.small_bytes = small_bytes
        self.bytes: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.calls: Counter[tuple[str, tuple[int, ...]]] = Counter()

    @staticmethod
    def by_kind(counted: Counter[tuple[str, tuple[int, ...]]]) -> dict[str, int]:
        """Return `bytes` or `calls` by kind of collective, over all sets of ranks."""
        kinds: Counter[str] = Counter()
        for (kind, _), number in counted.items():
            kinds[kind] += number
        return dict(kinds)

    def see(self, function: Any, args: Any, result: Any) -> None:
        """Count one operation, the operator `function` called with `args`, if it is a collective."""
        if function.namespace not in ("c10d", "_c10d_functional"):
            return
        library, name = function.name().split(".")[0].split("::")
        if library == "c10d" and name not in ("recv_", "barrier"):
            kind = _KINDS.get(name.removesuffix("_"))
            if kind is None:  # lists of tensors, as used to send objects
                text = f"ranks exchange objects ({function.name()}), which one rank alone cannot. Omit --dry-run."
                raise ConfigError(Problem("--dry-run", text))
            scripts = (each for each in args if isinstance(each, torch.ScriptObject))
            self._count(kind, args, dist.ProcessGroup.unbox(next(scripts)))
        elif library == "_c10d_functional" and name != "wait_tensor":
            group = private(dist.distributed_c10d, "_resolve_process_group")(args[-1])
            self._count(_FUNCTIONAL.get(name, name), [*args, result], group)

    def _count(self, kind: str, tensors: Any, group: dist.ProcessGroup) -> None:
        large, ranks = max((t.nbytes for t in tree_leaves(tensors) if isinstance(t, Tensor)), default=0), group.size()
        if large <= self.small_bytes:
            return
        key = kind, tuple(dist.get_process_group_ranks(group))
        self.calls[key] += 1
        self.bytes[key] += large if kind == "send" else large * (ranks - 1) // ranks * (1 + (kind == "all_reduce"))


class HeldBytes:
    """Counter of memory: bytes of all live storages created by operations, and their peak. Meta tensors have none."""

    def __init__(self) -> None:
        self.now_bytes = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._living: dict[int, ref[torch.UntypedStorage]] = {}

    def see(self, tensors: Any) -> None:
        """Count the storages of an operation's results."""
        for tensor in (tensors,) if isinstance(tensors, Tensor) else tree_leaves(tensors):
            if isinstance(tensor, Tensor) and _device(tensor).type != "meta":
                storage = tensor.untyped_storage()
                number = storage._cdata
                if number not in self._sizes:
                    self._sizes[number] = 0
                    self._living[number] = ref(storage, partial(self._drop, number))
                    self._resize(number, storage.nbytes())

    def _resize(self, number: int, size: int) -> None:
        self.now_bytes += size - self._sizes[number]
        self._sizes[number] = size
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _drop(self, number: int, _: Any) -> None:
        self.now_bytes -= self._sizes.pop(number)
        del self._living[number]

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """Context that also counts storages which are resized, as FSDP2 does with gathered parameters."""
        whole = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            done = whole(storage, size)
            if storage._cdata in self._sizes:
                self._resize(storage._cdata, size)
            return done

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = whole  # type: ignore[method-assign]


class Counting(TorchDispatchMode):
    """Dispatch mode that counts every operation while active: on fake tensors inside a FakeTensorMode, or on real ones.

    It counts memory (`held`), collectives (`sent`), `operations` and `host_waits`.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from guarding `__torch_dispatch__`: nothing is compiled here, and a guard costs time per call."""
        return False

    def __init__(self, small_bytes: int) -> None:
        """`small_bytes`: collectives up to this size carry counts, norms or flags, and are not counted."""
        super().__init__()
        self.held, self.sent = HeldBytes(), SentBytes(small_bytes)
        self.operations = self.host_waits = 0
        self._finding_shapes = False

    @contextmanager
    def following(self) -> Iterator[None]:
        """Context in which operations and FSDP2's resizes are counted; those of DTensor for shapes are not."""
        finder, name = private(_sharding_prop, "ShardingPropagator"), "_propagate_tensor_meta_non_cached"
        whole = private(finder, name)

        def find_shapes(*args: Any, **kwargs: Any) -> Any:
            self._finding_shapes = True
            try:
                return whole(*args, **kwargs)
            finally:
                self._finding_shapes = False

        setattr(finder, name, find_shapes)
        try:
            with self, self.held.following_resizes():
                yield
        finally:
            setattr(finder, name, whole)

    def begin(self) -> None:
        """Reset all counters to zero, and the peak of memory to the bytes that are live now."""
        self.sent, self.operations, self.host_waits = SentBytes(self.sent.small_bytes), 0, 0
        self.held.peak_bytes = self.held.now_bytes

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # DTensor splits itself into operations on local tensors
        if function is torch.ops.prim.device.default:
            return _device(args[0])  # called by autograd for every gradient
        if function is READ_NUMBERS:
            self.host_waits += 1
            fake = any(isinstance(each, FakeTensor) for each in args[0])
            return [float(_number(each)) for each in args[0]] if fake else function(*args)
        if function is torch.ops.aten._local_scalar_dense.default:
            self.host_waits += 1
            return _number(args[0]) if isinstance(args[0], FakeTensor) else function(*args)
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.c10d.recv_.default:
            _vote(args[0])
        if function.namespace != "prim" and not self._finding_shapes:
            self.operations += 1
            self.sent.see(function, args, result)
            self.held.see(result)
        return result


def _device(tensor: Tensor) -> torch.device:
    """Return the device of `tensor`; for fake tensors without dispatching an operation."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def _number(tensor: FakeTensor) -> bool | int | float:
    if tensor.constant is not None:
        with unset_fake_temporarily():
            known: bool | int | float = tensor.constant.item()
        return known
    return False if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 0


def _vote(tensors: list[Tensor]) -> None:
    """Set a received single integer to 1: torch's pipeline ranks vote on whether shapes are known."""
    for tensor in tensors:
        if isinstance(tensor, FakeTensor) and tensor.numel() == 1 and not tensor.dtype.is_floating_point:
            with unset_fake_temporarily():
                tensor.constant = torch.ones(tensor.shape, dtype=tensor.dtype)
