"""Base classes of a block's parts (mixers, feed-forward networks, norms): their shapes and costs, without torch.

A part (mixer, feed-forward, norm) is a registered config class: its fields are the part's own keys in YAML, its methods
return its parameters, sizes and costs in a given model. Linears, parameters, initial distributions, FLOPs, bytes, what
tensor-parallel ranks share and where a pipeline is cut follow by layer index. `build` alone imports torch: the module
that a kind names by `module`.

Letters: D hidden_size, T tokens of a sequence.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema.base import Group
from lightning_llm.config.schema.model import ModelConfig

if TYPE_CHECKING:
    from torch import nn

AuxiliaryReduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class Distribution:
    """Initial distribution of a parameter: `mean` if `std` is 0, else a normal, cut at `cut` standard deviations."""

    mean: float = 0.0
    std: float = 0.0
    cut: float | None = None


class Size(NamedTuple):
    """Number of inputs or outputs of a linear layer: `length` is `times` the value of the config key `key`.

    `text` describes where it comes from, for messages.
    """

    length: int
    key: str
    times: int
    text: str


class LinearSpec(NamedTuple):
    """A linear: `outputs` x `inputs`. `role`: how a tensor-parallel group shares it, see `Decoder.roles`.

    `depth_scaled`: the schemes of `model.init` that draw its weight with a smaller std in deeper layers. `groups`: the
    matrices stacked in the weight, one per expert; each token passes `per_token` of them. `all_tokens`: it takes the
    tokens of all context-parallel ranks, which gather its input.
    """

    name: str
    role: str
    outputs: Size
    inputs: Size
    bias: bool
    depth_scaled: tuple[str, ...] = ()
    groups: int = 1
    per_token: int = 1
    all_tokens: bool = False

    @property
    def elements(self) -> int:
        """Number of elements of the weight."""
        return self.groups * self.active_elements // self.per_token

    @property
    def active_elements(self) -> int:
        """Number of elements of the weight that multiply each token: of experts only the chosen ones."""
        return self.per_token * self.outputs.length * self.inputs.length

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight: (groups * outputs, inputs)."""
        return self.groups * self.outputs.length, self.inputs.length


class ParameterSpec(NamedTuple):
    """Description of one parameter: name, shape, role under tensor parallelism, and initial distribution.

    `distribution` is None for a linear's weight (`model.init` chooses it). `trained`: whether gradients update it.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    distribution: Distribution | None
    trained: bool = True


class ForwardPass(NamedTuple):
    """The conditions of a forward pass that decide which activations are saved for backward.

    `width`: bytes of an element of the compute dtype. `sequence_length`: tokens of a whole sequence; each of
    `context_ranks` computes a part. `documents`: attention stays within documents. `on_gpu`: CUDA's kernels run.
    `by_blocks`: FlexAttention computes masked attention.
    """

    width: int
    sequence_length: int
    documents: bool = False
    context_ranks: int = 1
    on_gpu: bool = False
    by_blocks: bool = False


class SavedTensor(NamedTuple):
    """A tensor that a part saves for backward: `elements` of `width` bytes for each token.

    Over a tensor-parallel group it is divided where its `split` is "within" the part, and with sequence parallelism
    where it is "outside", as norms' inputs; each rank has it whole where it is "gathered" (arXiv 2205.05198, section
    4). `linears` take it as input, and keep codes in its place where they run natively, unless something else `also`
    keeps it. `per_position`: all sequences of a micro-batch share it, as a mask of positions.
    """

    name: str
    elements: int
    width: int
    split: Literal["within", "gathered", "outside"] = "within"
    linears: tuple[str, ...] = ()
    also: bool = False
    per_position: bool = False


class MemoryPass(NamedTuple):
    """A memory-bound (non-GEMM) operation: bytes read and written per token, and number of operators.

    `outside`: of hidden states between parts, which a tensor-parallel group shares with sequence parallelism alone.
    """

    forward: float
    backward: float
    operators: int = 1
    """In each direction."""
    outside: bool = False


class Part(Group):
    """Base class of a block's parts. Sizes are those of the whole part, not of a rank's shard."""

    module: ClassVar[str]
    """`package.module:Class` of the nn.Module, called with (this kind, model), see `Norm.build_for` for norms."""

    auxiliary_losses: ClassVar[Mapping[str, AuxiliaryReduction] | tuple[str, ...]] = {}
    """Auxiliary losses that its module (no norm's) sets in each forward pass, `self.auxiliary_losses = {name: scalar}`:
    weighted, a mean over the tokens. The value defines how the losses of tensor-parallel ranks, each over some columns,
    combine into the loss of the whole part. "mean": a mean over columns or heads, or a loss of tensors that all ranks
    hold. "sum": a sum over columns or heads. A tuple of names declares neither, and is rejected with parallel.tp > 1.
    The step adds the mean over micro-batches and other ranks to its objective and records `auxiliary/NAME`."""

    why_compiled_on_request: ClassVar[str | None] = None
    """Why its block is compiled only under `parallel.compile=true`, not by default on CUDA; None if by default too."""

    def linears(self, model: ModelConfig) -> list[LinearSpec]:
        """Return the part's linear layers, in the order of the module's children and with their names."""
        return []

    def own_parameters(self, model: ModelConfig) -> list[ParameterSpec]:
        """Return the part's parameters that do not belong to linear layers."""
        return []

    def build(self, model: ModelConfig) -> "nn.Module":
        """Return the part's nn.Module, an instance of `module`."""
        return resolve_name(self.module)(self, model)

    def flops_per_token(self, model: ModelConfig, sequence_length: int) -> int:
        """Return the FLOPs of forward and backward per token outside of linear layers, for MFU."""
        return 0

    def saved_tensors(self, model: ModelConfig, forward: ForwardPass) -> list[SavedTensor]:
        """Return the activations saved for backward, excluding weights and their casts."""
        return []

    def kernel_outputs(self, model: ModelConfig, width: int, sequence_length: int) -> int:
        """Return the bytes per token of the kernel's outputs, which selective activation checkpointing keeps.

        Outputs of linear layers are not included. Tensor-parallel ranks share the bytes by heads.
        """
        return 0

    def divisions(self, model: ModelConfig) -> dict[str, tuple[int, str]]:
        """Return {key: (size, reason)} of the sizes that the number of tensor-parallel ranks must divide."""
        return {}

    def why_not_tensor_parallel(self, model: ModelConfig) -> str | None:
        """Return why tensor-parallel ranks cannot share it, for any number of them; None if they can."""
        return None

    def memory_passes(self, model: ModelConfig, width: int, compiled: bool) -> list[MemoryPass]:
        """Return the memory-bound operations outside of linear layers and the kernel, on elements of `width` bytes.

        One entry per operator; if `compiled`, fused neighbors read their inputs and write their outputs once.
        """
        return []

    def problems(self, model: ModelConfig) -> Iterator[Problem]:
        """Yield a problem for each contradiction between this part's settings and the model's shape."""
        yield from ()

    def roles(self, model: ModelConfig) -> dict[str, str]:
        """Return {name: role} of each child module with parameters; empty for a part without child modules."""
        own = {each.name.rpartition(".")[0]: each.role for each in self.own_parameters(model) if "." in each.name}
        return {linear.name: linear.role for linear in self.linears(model)} | own


class Mixer(Part):
    """Base class of token mixers (attention, recurrences). The module maps `(x [B, T, D], rope, mask)` to `[B, T, D]`.

    One that can generate has `new_cache` and `step`, too: `model.stepping.SteppingMixer`.
    """

    recurrent: ClassVar[bool] = False
    """Whether it carries a state from token to token instead of keys. If so the module gets no rope and no mask
    `[B, 1, T, T]`: it is called with `(x, None, document_ids)`. `document_ids` `[B, T]` are equal within a document,
    and a document's first token starts a new state; None for whole sequences."""

    context_parallel: ClassVar[bool] = False
    """Whether ranks can share a sequence. If so the module has `attend` and `kernel`, see `parallel.cp`."""

    takes_documents: ClassVar[bool] = False
    """Whether it mixes tokens beside its kernel, so that its module also takes `document_ids` `[B, T]` or None, after
    the mask."""

    def window_tokens(self, model: ModelConfig) -> int | None:
        """Return the number of tokens that a token sees, including itself; None: all tokens before it."""
        return None

    def context_elements(self, model: ModelConfig, width: int = 1) -> int:
        """Return the elements per token that context-parallel ranks gather (keys and values).

        `width`: number of tensor-parallel ranks, each of which gathers its share.
        """
        return 0

    def rope_width(self, model: ModelConfig) -> int:
        """Return the number of elements of a head that rotary position embedding rotates."""
        return 0 if self.recurrent else model.attention_head_dim


class FeedForward(Part):
    """Base class of token-wise networks: the module maps x `[B, T, D]` to `[B, T, D]`, each token independently.

    A module whose products depend on how many tokens come at once has a method `step` for generation.
    """

    context_parallel: ClassVar[bool] = True
    """Whether ranks can share a sequence."""

    def state_given(self, model: ModelConfig) -> int:
        """Return the fp32 elements per token that the module returns for the next block's, in a tuple with y; 0: only
        y."""
        return 0

    def state_taken(self, model: ModelConfig) -> int:
        """Return the elements of the state of the block before that the module takes after x; 0: none."""
        return 0

    def why_not_generated(self, model: ModelConfig) -> str | None:
        """Return why a token's result depends on other tokens of its batch, so that generation is impossible; else
        None."""
        return None


class Norm(Part):
    """Base class of norms over the last dimension. `vectors` names the parameters of a kind."""

    def vectors(self, model: ModelConfig) -> dict[str, float]:
        """Return {name: initial value} of the norm's parameter vectors."""
        raise NotImplementedError

    def build_for(self, model: ModelConfig, size: int) -> "nn.Module":
        """Return the norm's nn.Module over a last dimension of `size`: `module(size, model.norm_eps)`."""
        return resolve_name(self.module)(size, model.norm_eps)

    def build(self, model: ModelConfig) -> "nn.Module":
        return self.build_for(model, model.hidden_size)

    def own_parameters(self, model: ModelConfig) -> list[ParameterSpec]:
        return self.parameters_for(model, model.hidden_size, "replicate")

    def memory_passes(self, model: ModelConfig, width: int, compiled: bool) -> list[MemoryPass]:
        """Return one operation: forward it reads x and writes y, backward it reads dy and x and writes dx."""
        return [MemoryPass(2 * width * model.hidden_size, 3 * width * model.hidden_size, 1, outside=True)]

    def parameters_for(self, model: ModelConfig, size: int, role: str) -> list[ParameterSpec]:
        """Return the norm's parameters over a last dimension of `size`, with the given tensor-parallel `role`."""
        made = self.vectors(model).items()
        return [ParameterSpec(name, (size,), role, Distribution(mean=first)) for name, first in made]

    def saved_for(self, size: int, forward: ForwardPass) -> list[SavedTensor]:
        """Return the activations saved for backward for one vector of `size`; by default its input."""
        return [SavedTensor("input", size, forward.width, "outside")]

    def saved_tensors(self, model: ModelConfig, forward: ForwardPass) -> list[SavedTensor]:
        return self.saved_for(model.hidden_size, forward)


class Affine(Norm):
    """A shift and a scale in the place of a norm, `(x + bias) * weight`: the residual scaling of a block."""

    module: ClassVar[str] = "lightning_llm.model.norm:Affine"

    def vectors(self, model: ModelConfig) -> dict[str, float]:
        return {"weight": 1.0, "bias": 0.0}

    def saved_for(self, size: int, forward: ForwardPass) -> list[SavedTensor]:
        return [SavedTensor("shifted input", size, forward.width, "outside")]

    def build_for(self, model: ModelConfig, size: int) -> "nn.Module":
        return resolve_name(self.module)(size)


def hidden(model: ModelConfig) -> Size:
    """Return the size of the residual stream, `model.hidden_size`, as a side of a linear layer."""
    return Size(model.hidden_size, "model.hidden_size", 1, "model.hidden_size")
