"""What a checkpoint holds, taken from a run between two steps; and copies of it that training cannot change."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from lightning_llm.data.mixing.skipped import SKIPPED_SAMPLES
from lightning_llm.linalg.local_part import local
from lightning_llm.train.checkpoint.callback_state import FILE as CALLBACKS
from lightning_llm.train.checkpoint.callback_state import collect
from lightning_llm.train.checkpoint.manifest import PRECISION, PROGRESS
from lightning_llm.train.module import LanguageModule

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True)
class Snapshot:
    """The state after `step`: `tensors` of this rank by kind and name, and `content`, the first rank's other files.

    `copies`: this rank's part of each tensor on the CPU, by "<kind>.<name>"; None: what is written are the tensors
    themselves, so nothing may change them before they are. `about`: further entries of the manifest.
    """

    step: int
    tensors: Mapping[str, dict[str, Tensor]]
    content: Mapping[str, bytes]
    copies: "CpuCopies | None" = None
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def planner(self) -> DefaultSavePlanner:
        """What tells torch which tensors there are, and what they hold."""
        return DefaultSavePlanner() if self.copies is None else _CopiesPlanner(self.copies)


def take(module: LanguageModule, optimizer: torch.optim.Optimizer) -> Snapshot:
    """Return the state that training stands in. Collective over the stages of a pipeline.

    Raises:
        ConfigError: a callback's state is of a kind that no checkpoint holds.
    """
    model, layout = module.model, module.trainer.strategy.layout
    state = optimizer_state(model, optimizer)
    callbacks = collect(module.trainer)
    encoded_callbacks = callbacks.encode()
    numbers = union(
        layout.gather_over_stages({name: value for name, value in state.items() if not isinstance(value, Tensor)})
    )
    delayed = union(layout.gather_over_stages({k: v.cpu() for k, v in module.quantisation.state(model).items()}))
    content = {
        PRECISION: safetensors_bytes({name: tensor.contiguous() for name, tensor in delayed.items()}),
        CALLBACKS: encoded_callbacks,
        PROGRESS: json.dumps(_progress(module, numbers), indent=1).encode(),
    }
    tensors = {
        "model": parameters(model),
        "optimizer": {name: value for name, value in state.items() if isinstance(value, Tensor)},
        **algorithm_state(module),
        "callbacks": callbacks.tensors,
    }
    return Snapshot(module.completed_steps, tensors, content)


class CpuCopies:
    """Copies of a rank's tensors in memory of the CPU that is kept from one save to the next, pinned for a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def of(self, snapshot: Snapshot) -> Snapshot:
        """Return `snapshot` with its tensors copied here; what was copied before is written over.

        On a GPU the copies are but enqueued, on the stream of the steps: later steps change the tensors after that.
        """
        named = {f"{kind}.{name}": each for kind, part in snapshot.tensors.items() for name, each in part.items()}
        own = {name: local(each).detach() for name, each in named.items()}
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in own.items()}
        for name, tensor in own.items():
            self._buffers[name].copy_(tensor, non_blocking=tensor.is_cuda)
        if any(tensor.is_cuda for tensor in own.values()):
            self._copied = torch.cuda.Event()
            self._copied.record()
        return replace(snapshot, copies=self)

    def wait(self) -> None:
        """Return when the copies are whole."""
        if self._copied is not None:
            self._copied.synchronize()

    def __getitem__(self, name: str) -> Tensor:
        return self._buffers[name]

    def _buffer(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._buffers.get(name)
        if kept is not None and (kept.shape, kept.dtype) == (tensor.shape, tensor.dtype):
            return kept
        # In the strides that torch would write of the tensor itself.
        return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


class _CopiesPlanner(DefaultSavePlanner):
    """Plans by the tensors of training, of which it looks at the shapes alone, and reads their copies."""

    def __init__(self, copies: CpuCopies):
        super().__init__()
        self.copies = copies

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.copies[index.fqn]


def parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters by name, detached."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def optimizer_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the optimizer's tensors and numbers by flat names."""
    return get_optimizer_state_dict(model, optimizer, options=FLAT)


def algorithm_state(module: LanguageModule) -> dict[str, dict[str, Tensor]]:
    """Return the training algorithm's tensors, for an algorithm that has any."""
    tensors = module.train_step.algorithm.tensors()
    return {"algorithm": tensors} if tensors else {}


def union(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what all pipeline stages have by name; a tied embedding's entries, which two have, are equal."""
    return {name: value for part in parts for name, value in part.items()}


def _progress(module: LanguageModule, optimizer: dict[str, Any]) -> dict[str, Any]:
    """Return what `PROGRESS` says; `optimizer` holds its state's numbers, by name."""
    loss_scale = module.scaler.state
    algorithm = module.train_step.algorithm.numbers()
    skipped = module.trainer.datamodule.corpus.skipped
    return {
        "step": module.state.completed_steps,
        "skipped_steps": module.state.skipped_steps,
        "skipped_in_a_row": module.state.skipped_in_a_row,
        "spikes": asdict(module.spikes.state),
        "loss_scale": asdict(loss_scale) if loss_scale else None,
        "optimizer": optimizer,
        **({"algorithm": algorithm} if algorithm else {}),
        **({SKIPPED_SAMPLES: skipped} if skipped else {}),
    }
