"""Costs of operations, and of a block's passes on one micro-batch, by roofline. Imports no torch.

Symbols: M is the number of tokens of a micro-batch per tensor-parallel group, D is hidden_size.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_llm.config.schema import Config, ModelConfig
from lightning_llm.model.attention.kinds import AttentionSpec
from lightning_llm.model.spec import LinearSpec, MemoryPass, Mixer
from lightning_llm.model.structure import block_linears, block_parts, for_layers, mixer_of
from lightning_llm.optim.kinds import DTYPE_BYTES
from lightning_llm.plan.axes.ep import exchanged_bytes
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.memory.activations import tokens_of
from lightning_llm.plan.memory.units import micro_batches_per_rank, reduces_once, uses_fsdp
from lightning_llm.plan.time.device import Device, Formats
from lightning_llm.plan.time.links import Links
from lightning_llm.plan.traffic import Sent

PARTS = (
    "gemm",
    "attention",
    "memory_bound",
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "gathers",
    "reductions",
    "optimizer",
    "bubble",
)
"""Parts of a step's seconds. `attention`: kernels of mixers, without linears. `memory_bound`: norms, activations,
rotary positions, sums, casts, the loss. `gathers`, `reductions`: exposed communication of FSDP and of sums over ranks.
`bubble`: waiting for other stages."""


@dataclass
class Cost:
    """Cost of operations on one rank: seconds by part (`PARTS`), and bytes sent by (kind of collective, axes)."""

    seconds: dict[str, float] = field(default_factory=dict)
    sent: Sent = field(default_factory=Counter)

    def __add__(self, other: "Cost") -> "Cost":
        made = Cost(dict(self.seconds), Counter(self.sent))
        made.sent.update(other.sent)
        for part, value in other.seconds.items():
            made.spend(part, value)
        return made

    def __mul__(self, times: int) -> "Cost":
        seconds = {part: times * value for part, value in self.seconds.items()}
        return Cost(seconds, Counter({key: times * value for key, value in self.sent.items()}))

    def spend(self, part: str, seconds: float) -> None:
        """Add `seconds` to those of `part`."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    @property
    def total(self) -> float:
        """Total seconds over all parts."""
        return sum(self.seconds.values())


@dataclass
class Passes:
    """Costs of a forward pass, of a backward pass, and of the recomputation that checkpointing adds to it (`again`)."""

    forward: Cost = field(default_factory=Cost)
    backward: Cost = field(default_factory=Cost)
    again: Cost = field(default_factory=Cost)

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(self.forward + other.forward, self.backward + other.backward, self.again + other.again)


BACKWARD_OF_ATTENTION = 2.5
"""Matrix products of attention's backward pass over those of its forward pass, 5 / 2: scores are recomputed (Dao et al.
2022, arXiv 2205.14135, algorithm 4)."""
SCORE_BYTES_ON_CPU = (22, 40)
"""Bytes that `model.attention.cpu_kernel` moves per score, forward and backward: mask, softmax, cast, in fp32."""


class Operations:
    """Costs of operations on a rank of a layout, for one micro-batch.

    `compiled`: whether blocks are compiled. `by_blocks`: whether attention with a mask uses FlexAttention.
    """

    def __init__(
        self,
        config: Config,
        degrees: Degrees,
        device: Device,
        links: Links,
        formats: Formats,
        compiled: bool,
        by_blocks: bool,
    ):
        self.config, self.degrees, self.device, self.links, self.formats = config, degrees, device, links, formats
        self.by_blocks = by_blocks
        self.width = DTYPE_BYTES[config.precision.compute_dtype]
        self.tokens = tokens_of(config, degrees)
        self.compiled = compiled
        # Unsharded gradients are added up over micro-batches unless FSDP reduces them after each.
        self._adds_up = micro_batches_per_rank(config, degrees) > 1 and (
            not uses_fsdp(config.parallel, degrees) or reduces_once(config.parallel, degrees)
        )
        self._gemms: dict[tuple[int, int, int, str], float] = {}
        self._blocks: dict[tuple[str, str, tuple[tuple[int, float], ...]], Passes] = {}
        self._linears = _linears_of_blocks(config.model)

    def memory(self, moved: float, operators: float = 1) -> Cost:
        """Return the cost of moving `moved` bytes with `operators` kernels."""
        return Cost({"memory_bound": self.device.bytes_seconds(moved, operators)})

    def collective(self, part: str, kind: str, axes: str, sent_bytes: int, times: int = 1) -> Cost:
        """Return the cost of `times` collectives without overlap, with `sent_bytes` in total."""
        if not sent_bytes:
            return Cost()
        seconds = self.links.seconds(kind, axes, sent_bytes, times)
        return Cost({part: seconds}, Counter({(kind, axes): sent_bytes}))

    def gemm(self, rows: int, columns: int, summed: int, number_format: str) -> float:
        """Return `Device.gemm_seconds`, cached by shape."""
        shape = rows, columns, summed, number_format
        if shape not in self._gemms:
            self._gemms[shape] = self.device.gemm_seconds(*shape)
        return self._gemms[shape]

    def linear(self, name: str, spec: LinearSpec) -> Passes:
        """Return the cost of a linear's GEMMs and casts, including weight casts unless FSDP performs them."""
        tp = self.degrees.tp
        outputs = spec.outputs.length // (tp if spec.role in ("column", "vocabulary") else 1)
        inputs = spec.inputs.length // (tp if spec.role == "row" else 1)
        groups = spec.groups // (tp if spec.role == "expert" else 1)
        tokens = self.tokens * (self.degrees.cp if spec.all_tokens else 1)
        rows = max(1, tokens * spec.per_token // spec.groups)  # of each group, if the load is balanced
        shapes = {
            "fprop": (rows, outputs, inputs),
            "dgrad": (rows, inputs, outputs),
            "wgrad": (outputs, inputs, rows),
        }
        elements = {"x": groups * rows * inputs, "w": groups * outputs * inputs, "dy": groups * rows * outputs}
        forward, backward = Cost(), Cost()
        for made, share in self.formats.parts(name):
            own = groups if share == 1 else groups * share
            seconds = {gemm: own * self.gemm(*shape, made.gemms[gemm]) for gemm, shape in shapes.items()}
            cast = {operand: share * moved * elements[operand] for operand, moved in made.cast_bytes.items()}
            forward += Cost({"gemm": seconds["fprop"]})
            forward += self.memory(cast.get("x", 0) + cast.get("w", 0), own * len(cast.keys() - {"dy"}))
            backward += Cost({"gemm": seconds["dgrad"] + seconds["wgrad"]})
            moved = cast.get("dy", 0) + (self.width * rows * outputs if spec.bias else 0)  # experts have no bias
            backward += self.memory(moved, own * (len(cast) > 0))
        # With ep a rank has fewer experts, and runs each for every sender: as many products.
        held = elements["w"] // (self.degrees.ranks("ep") if spec.role == "expert" else 1)
        weights = self.weight_casts(held, on_use=held < elements["w"])
        gradient = DTYPE_BYTES[self.config.precision.main_grad_dtype]
        added = (
            elements["w"] if held < elements["w"] else held if self._adds_up else 0
        )  # of each sender, or micro-batch
        backward += self.memory(3 * gradient * added, added > 0)
        return Passes(forward + weights.forward, backward + weights.backward, forward + weights.forward)

    def weight_casts(self, elements: int, on_use: bool = False) -> Passes:
        """Return the cost of casting `elements` of a master weight and of its gradient; 0 if FSDP makes both casts.

        `on_use`: FSDP does not.
        """
        recipe = self.config.precision
        master = DTYPE_BYTES[recipe.master_dtype]
        sharded = uses_fsdp(self.config.parallel, self.degrees) and recipe.gather_dtype == recipe.compute_dtype
        sharded = sharded and not on_use
        if recipe.compute_dtype == recipe.master_dtype or sharded:
            return Passes()
        cost = self.memory((master + self.width) * elements)
        rounded = cost if recipe.wgrad_dtype is None else Cost()
        return Passes(cost, rounded, cost)

    def passes_of(self, passes: Iterable[MemoryPass]) -> Passes:
        """Return the cost of a part's memory-bound operations."""
        total = Passes()
        for each in passes:
            shared = self.degrees.tp if not each.outside or self.config.parallel.sequence_parallel else 1
            tokens = self.tokens / shared
            forward = self.memory(each.forward * tokens, each.operators)
            total += Passes(forward, self.memory(each.backward * tokens, each.operators), forward)
        return total

    def kernel(self, mixer: Mixer) -> Passes:
        """Return the cost of a mixer's kernel, without its linears.

        Causal attention computes half of the scores. With a mask, which context parallelism always needs, torch's
        kernels compute all scores, and FlexAttention only unmasked blocks. For documents, half is assumed, since their
        lengths depend on the data.
        """
        config, model, length = self.config, self.config.model, self.config.data.sequence_length
        on_cpu, recipe = self.device.cluster.hardware == "cpu", config.precision
        each = mixer.flops_per_token(model, length) / 3 / self.degrees.tp
        masked, ratio = False, 2.0
        if not mixer.recurrent:
            window = min(mixer.window_tokens(model) or length, length)
            masked = not on_cpu and (self.degrees.cp > 1 or config.data.document_mask or window < length)
            if masked and self.by_blocks and isinstance(mixer, AttentionSpec) and mixer.takes_kernels:
                each *= 1 if window < length else 0.5
            else:
                each *= (1 if masked else 0.5) * length / window
            ratio = BACKWARD_OF_ATTENTION
        peak = self.device.required_peak(self.device.mixer_format(recipe.compute_dtype, recurrent=mixer.recurrent))
        scores = each / (2 * _widths(mixer, model)) if on_cpu and not mixer.recurrent else 0
        costs = []
        for times, moved in zip((1.0, ratio), SCORE_BYTES_ON_CPU, strict=True):
            seconds = self.tokens * each * times / peak + self.device.bytes_seconds(moved * scores * self.tokens)
            costs.append(Cost({"attention": seconds}))
        return Passes(costs[0], costs[1], costs[0])

    def block(self, index: int) -> Passes:
        """Return the costs of the passes of block `index` (`block_passes`), cached for equal blocks."""
        parts = (part for name in self._linears[index] for part in self.formats.parts(name))
        formats = tuple((id(made), share) for made, share in parts)
        key = self.config.model.layer_name(index), self.config.parallel.checkpointing_of(index), formats
        if key not in self._blocks:
            self._blocks[key] = block_passes(self, index)
        return self._blocks[key]


def block_passes(operations: Operations, index: int) -> Passes:
    """Return the costs of the passes of block `index`; `again`: recomputation in the config's checkpointing mode."""
    config, model, width = operations.config, operations.config.model, operations.width
    gemms, rest = Passes(), Passes()
    for part_name, part in block_parts(model, index).items():
        linears = part.linears(model)
        for linear in linears:
            gemms += operations.linear(f"layers.{index}.{part_name}.{linear.name}", linear)
        rest += operations.passes_of(part.memory_passes(model, width, operations.compiled))
        summed = sum(linear.role in ("column", "duplicate") for linear in linears) - 1  # gradients of one x
        if summed > 0:
            moved = (summed + 2 if operations.compiled else 3 * summed) * width * model.hidden_size
            rest.backward += operations.memory(moved * operations.tokens, 1 if operations.compiled else summed)
    sums = (2 if operations.compiled else 3) * width * model.hidden_size
    rest += operations.passes_of([MemoryPass(sums, sums, outside=True)] * 2)  # residuals
    mixer = mixer_of(model, index)
    kernel, sent = operations.kernel(mixer), _collectives(operations, mixer, index)
    again = rest.again + sent.again
    if config.parallel.checkpointing_of(index) == "full":
        again += gemms.again + kernel.again
    return Passes(
        gemms.forward + rest.forward + kernel.forward + sent.forward,
        gemms.backward + rest.backward + kernel.backward + sent.backward,
        again,
    )


def _collectives(operations: Operations, mixer: Mixer, index: int) -> Passes:
    """Return the cost of a block's tensor-, context- and expert-parallel collectives, with bytes as in `plan.traffic`.

    They overlap with nothing: each is waited for where it is called (`parallel.collectives`). Gathered or scattered
    tokens are also copied, since the parts of ranks are interleaved in memory.
    """
    config, degrees, model, width = operations.config, operations.degrees, operations.config.model, operations.width
    found = Passes()
    if (tp := degrees.tp) > 1:
        hidden = operations.tokens * model.hidden_size
        once = (tp - 1) * width * hidden // tp
        if config.parallel.sequence_parallel:
            gather = operations.collective("tensor_parallel", "all_gather", "tp", once)
            gather += operations.memory(2 * width * hidden)
            scatter = operations.collective("tensor_parallel", "reduce_scatter", "tp", once)
            scatter += operations.memory(2 * width * hidden)
            both = gather * 2 + scatter * 2
            found += Passes(both, both, gather * 2 + scatter)
        else:
            reduced = operations.collective("tensor_parallel", "all_reduce", "tp", 2 * once)
            found += Passes(reduced * 2, reduced * 2, reduced)
        given = width * operations.tokens * _duplicated_outputs(operations, index)
        found.backward += operations.collective("tensor_parallel", "all_reduce", "tp", 2 * given * (tp - 1) // tp)
    if degrees.cp > 1:
        sent = width * operations.tokens * (degrees.cp - 1) * mixer.context_elements(model, degrees.tp)
        gather = operations.collective("context_parallel", "all_gather", "cp", sent)
        found += Passes(gather, operations.collective("context_parallel", "reduce_scatter", "cp", sent), gather)
    if (ep := degrees.ranks("ep")) > 1:
        rows = exchanged_bytes(config, operations.tokens, ep)(index)
        both = operations.collective("expert_parallel", "all_to_all", "ep", rows, 2)
        found += Passes(both, both, both)
    return found


def _widths(mixer: Mixer, model: ModelConfig) -> int:
    """Return the elements per head of keys and values together."""
    if isinstance(mixer, AttentionSpec):
        heads = mixer.heads(model)
        return heads.width + heads.value_width
    return 2 * model.attention_head_dim


def _linears_of_blocks(model: ModelConfig) -> list[list[str]]:
    layers = range(model.num_layers)
    names = for_layers(model, layers, lambda index: [linear.name for linear in block_linears(model, index)])
    return [[f"layers.{index}.{name}" for name in names[index]] for index in layers]


def _duplicated_outputs(operations: Operations, index: int) -> int:
    model = operations.config.model
    linears = (linear for part in block_parts(model, index).values() for linear in part.linears(model))
    return sum(linear.outputs.length for linear in linears if linear.role == "duplicate")
