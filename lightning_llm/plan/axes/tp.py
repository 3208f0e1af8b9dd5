"""Tensor parallelism: the axis, and the weights of any transformer to cut, chosen by their names. Imports no torch."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from lightning_llm.base.errors import Problem
from lightning_llm.config.schema import Config, ModelConfig
from lightning_llm.model.spec import AuxiliaryReduction, LinearSpec, Norm, Part
from lightning_llm.model.structure import (
    block_linears,
    block_parameters,
    block_parts,
    for_layers,
    linears_of,
    norm_of,
    replicated_within,
)
from lightning_llm.optim.kinds import DTYPE_BYTES
from lightning_llm.plan.axes.axis import Dimension, MeshAxis, divisors
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.divisibility import SHARD_AXES, ShardedAxis, shared_side
from lightning_llm.plan.nodes import ranks_per_node

if TYPE_CHECKING:
    from lightning_llm.plan.traffic import RankStep, Sent


class TensorAxis(MeshAxis):
    """Axis of ranks that each have a part of every layer's width, according to the roles of its linears."""

    name: ClassVar[str] = "tp"
    cuts: ClassVar[tuple[Dimension, ...]] = ("width",)
    on_ranks: ClassVar[str] = "lightning_llm.parallel.tp:TensorParallel"

    def layout_problems(self, config: Config, degrees: Degrees, fits: bool) -> Iterator[Problem]:
        """Yield the auxiliary losses that do not declare how the losses of the ranks combine."""
        if degrees.tp > 1:
            yield from _auxiliary_problems(config.model, degrees.tp)

    def search_degrees(self, config: Config, ranks: int) -> Sequence[int]:
        """Return the divisors of `ranks` that fit within a machine (arXiv 2104.04473, section 3.2)."""
        per_node = ranks_per_node(config)
        return [each for each in divisors(ranks) if each <= per_node]

    def machine_problems(self, config: Config, degrees: Degrees) -> Iterator[Problem]:
        """Yield a problem if a tensor-parallel group spans machines.

        Its four collectives per block and micro-batch overlap with no computation, so between machines they dominate
        the step (Narayanan et al. 2021, arXiv 2104.04473, section 3.2; Dash et al. 2023, arXiv 2312.12705, on Frontier
        with 8 devices per node).
        """
        per_node = ranks_per_node(config)
        if degrees.tp > per_node and config.trainer.devices > 1:
            text = (
                f"is {degrees.tp}, and a machine has {per_node} ranks (trainer.devices), so every block would wait for "
                f"sums between machines. Set it to {per_node} or less, and raise parallel.pp."
            )
            yield Problem("parallel.tp", text)

    def sharding_problems(self, config: Config, degrees: Degrees) -> Iterator[Problem]:
        """Yield heads, widths, tokens between layers and optimizer rows that the degree does not divide."""
        yield from _weight_problems(config.model, degrees.tp)
        if degrees.tp > 1:
            yield from _parameter_problems(config.model, degrees.tp)
            yield from _undivided_parts(config.model, degrees.tp)
        length, cp, tp = config.data.sequence_length, degrees.sequence, degrees.tp
        if tp > 1 and config.parallel.sequence_parallel and length % (cp * tp):
            text = (
                f"is {length}: {cp} context-parallel rank(s) have {length / cp:g} tokens each, and tp={tp} "
                f"does not divide that. Use a multiple of {cp * tp}, or set parallel.sequence_parallel=false."
            )
            yield Problem("data.sequence_length", text)
        names = {each.inputs.length: each.name for each in linears_of(config.model).values() if each.role == "row"}
        for columns, name in names.items():
            if problem := config.optim.shard_problem(columns, tp):
                yield Problem("parallel.tp", f"is {tp}, and splits the rows of {name} into parts {problem}, or tp=1.")

    def cut_operands(
        self, operand: str, linears: list[LinearSpec], config: Config, degrees: Degrees
    ) -> Iterator[tuple[int, ShardedAxis]]:
        if degrees.tp == 1:
            return
        alike: dict[tuple[int, str, str, int], list[LinearSpec]] = {}
        for linear in linears:
            axis = SHARD_AXES[linear.role][operand]
            if axis is not None and linear.role != "expert":
                part, side = linear.name.partition(".")[0], "outputs" if linear.role == "column" else "inputs"
                alike.setdefault((axis, part, side, shared_side(linear).length), []).append(linear)
        for (axis, _, side, width), several in alike.items():
            short = ", ".join(dict.fromkeys(linear.name.rpartition(".")[2] for linear in several))
            made_of = shared_side(several[0])
            text = f"the {side} of {short}"
            yield axis, ShardedAxis(text, width, degrees.tp, "tp", made_of.key, made_of.times)

    def add_sent(self, sent: "Sent", step: "RankStep") -> None:
        """Add the bytes sent within a tensor-parallel group.

        - Each split part of a layer is entered and left once, forward and backward. With sequence parallelism that is
          four gathers or scatters of all tokens' hidden states per layer, otherwise two all-reduces of as many bytes
          together (arXiv 2205.05198, section 4.2.2). A recomputed layer repeats its forward pass except for the last
          collective.
        - The embedding's output is in the master dtype; the head's input is gathered; the loss takes three fp32 numbers
          per token.
        - Gradients of norms, positions and row-parallel biases are all-reduced once per step with sequence parallelism,
          otherwise the first rank broadcasts them. Those of norms within heads and within parts are always all-reduced,
          those of duplicated linears always broadcast. The input gradients of duplicated linears are all-reduced.
        """
        recipe, model, tp = step.config.precision, step.config.model, step.degrees.tp
        if tp == 1:
            return
        sequence, micro_batches = step.config.parallel.sequence_parallel, step.micro_batches
        tokens, hidden, compute = step.tokens, model.hidden_size, DTYPE_BYTES[recipe.compute_dtype]
        once = (tp - 1) * compute * tokens * hidden // tp
        looked_up = (tp - 1) * DTYPE_BYTES[recipe.master_dtype] * tokens * hidden // tp
        layers, again = len(step.layers), len(step.recomputed)
        first, last = step.parts[0].first, step.parts[-1].last
        roles = ("replicate", "per_head", "duplicate")
        alike, per_head, duplicated = (_elements(model, step.layers, role) for role in roles)
        within = _elements_within(model, step.layers)
        alike, per_head = alike - within, per_head + within
        alike += last * hidden * len(norm_of(model).vectors(model))
        alike += model.max_sequence_length * hidden if first and model.position == "learned" else 0
        summed, sent_on = (alike + per_head, duplicated) if sequence else (per_head, alike + duplicated)
        width, ranks = DTYPE_BYTES[recipe.main_grad_dtype], step.shard_ranks
        sent["all_reduce", "tp"] += 2 * (width * summed // ranks) * (tp - 1) // tp
        sent["broadcast", "tp"] += (width * sent_on // ranks) * (tp - 1) // tp
        given = compute * tokens * _duplicated_outputs(model, step.layers)
        sent["all_reduce", "tp"] += micro_batches * 2 * given * (tp - 1) // tp
        if sequence:
            sent["all_gather", "tp"] += micro_batches * ((4 * layers + 2 * again + last) * once + first * looked_up)
            sent["reduce_scatter", "tp"] += micro_batches * ((4 * layers + again + last) * once + first * looked_up)
        else:
            sent["all_reduce", "tp"] += micro_batches * 2 * ((4 * layers + again + last) * once + first * looked_up)
        more = micro_batches * once * _further_exits(model, step.layers)  # forward; in the backward pass a gather
        repeated = micro_batches * once * _further_exits(model, step.recomputed)
        sent["reduce_scatter" if sequence else "all_reduce", "tp"] += (1 if sequence else 2) * (more + repeated)
        sent["all_gather", "tp"] += more if sequence else 0
        if last:
            sent["all_reduce", "tp"] += micro_batches * 2 * (3 * 4 * tokens) * (tp - 1) // tp

    def order_problem(self, degrees: Degrees) -> str | None:
        return f"tp={degrees.tp} changes the order of sums within a micro-batch"


def _weight_problems(model: ModelConfig, tp: int) -> Iterator[Problem]:
    sizes: dict[str, tuple[int, str]] = {}
    for parts in for_layers(model, range(model.num_layers), lambda index: list(block_parts(model, index).values())):
        for part in parts:
            sizes |= part.divisions(model)
    sizes["the padded vocabulary"] = model.padded_vocab_size, "its rows are split; see model.vocab_multiple"
    for name, (size, why) in sizes.items():
        if size % tp:
            text = f"must divide {name} = {size} ({size} = {size // tp} x {tp} + {size % tp}): {why}."
            yield Problem("parallel.tp", f"{text} Use a divisor of {size}.", tp)


def _all_parts(model: ModelConfig) -> list[Part]:
    def of_block(index: int) -> list[Part]:
        return list(block_parts(model, index).values())

    return list(chain.from_iterable(for_layers(model, range(model.num_layers), of_block)))


def _auxiliary_problems(model: ModelConfig, tp: int) -> Iterator[Problem]:
    """Yield problems of auxiliary losses with no declared reduction over ranks, or with two different ones."""
    reductions: dict[str, dict[str, str]] = {}
    for part in _all_parts(model):
        declared = part.auxiliary_losses
        for name in declared:
            reduction = declared[name] if isinstance(declared, Mapping) else "not declared"
            reductions.setdefault(name, {})[type(part).__name__] = reduction
    for name, by_class in reductions.items():
        found = set(by_class.values())
        if len(found) == 1 and found <= set(get_args(AuxiliaryReduction)):
            continue
        listed = ", ".join(f"{each}: {reduction}" for each, reduction in by_class.items())
        text = (
            f"is {tp}, and auxiliary loss '{name}' has no single reduction over these ranks ({listed}). Declare "
            f"auxiliary_losses = {{'{name}': 'mean'}} in the config class, or 'sum' if the loss is a sum over columns "
            "or heads (docs/howto/extend.md). Or set parallel.tp=1."
        )
        yield Problem("parallel.tp", text)


def _parameter_problems(model: ModelConfig, tp: int) -> Iterator[Problem]:
    """Yield the parameters that a part holds itself: there is no module to give a forward pass on a rank's part."""
    found: dict[str, None] = {}
    for part in _all_parts(model):
        if not isinstance(part, Norm):
            bare = [each.name for each in part.own_parameters(model) if "." not in each.name]
            found |= dict.fromkeys(f"'{name}' of {type(part).__name__}" for name in bare)
    for name in found:
        text = (
            f"is {tp}, and parameter {name} belongs to no child module. Move it into a child module that has "
            "normalise(x, weight, bias), as norms do, or set parallel.tp=1."
        )
        yield Problem("parallel.tp", text)


def _undivided_parts(model: ModelConfig, tp: int) -> Iterator[Problem]:
    """Yield the reasons for which parts of the model are not divided."""
    for why in dict.fromkeys(part.why_not_tensor_parallel(model) for part in _all_parts(model)):
        if why is not None:
            text = f"is {tp}, and {why}. Set 1, and split weights or experts instead (parallel.dp_shard, ep)."
            yield Problem("parallel.tp", text)


def _elements_within(model: ModelConfig, layers: list[int]) -> int:
    """Return the elements of modules within the parts of the blocks `layers` that all ranks hold whole."""

    def within(index: int) -> int:
        each = (replicated_within(part, model) for part in block_parts(model, index).values())
        return sum(math.prod(parameter.shape) for parameter in chain.from_iterable(each) if parameter.trained)

    return sum(for_layers(model, layers, within))


def _elements(model: ModelConfig, layers: list[int], role: str) -> int:
    """Return the elements of the parameters with `role` in the blocks `layers`."""

    def within(index: int) -> int:
        every = (each for each in block_parameters(model, index) if each.trained)
        return sum(math.prod(each.shape) for each in every if each.role == role)

    return sum(for_layers(model, layers, within))


def _further_exits(model: ModelConfig, layers: list[int]) -> int:
    """Return how many sums the parts of the blocks `layers` leave with besides one each: of shared experts."""

    def within(index: int) -> int:
        roles = [{linear.role for linear in part.linears(model)} for part in block_parts(model, index).values()]
        return sum({"row", "expert"} <= each for each in roles)

    return sum(for_layers(model, layers, within))


def _duplicated_outputs(model: ModelConfig, layers: list[int]) -> int:
    """Return the output elements per token of the duplicated linears in the blocks `layers`."""

    def within(index: int) -> int:
        return sum(linear.outputs.length for linear in block_linears(model, index) if linear.role == "duplicate")

    return sum(for_layers(model, layers, within))


AXIS = TensorAxis()


CutSide = Literal["outputs", "inputs", "vocabulary", "replicate"]
"""The side of a weight that ranks split. `vocabulary`: rows are token ids. `replicate`: every rank has all of it."""

_NUMBER = re.compile(r"\.\d+\.")
_FUSED = re.compile(r"^(c_attn|qkv|query_key_value|qkv_proj|w_?qkv|in_proj|W_pack|gate_up_proj)$")
_LAST = re.compile(r"^(o|out|wo|dense|c_proj|o_proj|out_proj|down|down_proj|fc2|fc_out|w2|dense_4h_to_h|lin2)$")
_FIRST = re.compile(
    r"^([qkv]|[qkv]_proj|query|key|value|w[qkv]|q_lin|k_lin|v_lin|up|up_proj|gate|gate_proj|fc1|fc_in|c_fc|wi(_\d)?|w1|w3|"
    r"dense_h_to_4h|lin1)$"
)
_EMBEDDING = re.compile(r"(^|\.)(embedding|embed_tokens|wte|word_embeddings|tok_embeddings|shared|embed_in)$")
_HEAD = re.compile(r"(^|\.)(lm_head|head|embed_out|output)$")
_POSITIONS = re.compile(r"posi|wpe|relative_attention_bias|rotary")


def tensor_axes(
    shapes: Mapping[str, tuple[int, ...]], ranks: int = 1, transposed: Iterable[str] = ()
) -> dict[str, CutSide]:
    """Return {module: side of its weight that a tensor-parallel group of `ranks` splits}.

    The rules are Redco's (Tan et al. 2023, arXiv 2310.16355, section 3.1; tanyuqian/redco, partition_utils). In
    attention and feed-forward networks, matrices that read the residual stream are split by outputs, and matrices that
    add to it by inputs. Embeddings and the head are split by the vocabulary; vectors and position tables are
    replicated. A matrix with an unknown name is split by the other side than the previous one of its block, in the
    order of `shapes`. Sizes that `ranks` does not divide are replicated.

    Args:
        shapes: {full parameter name: shape}, e.g. "model.layers.0.self_attn.q_proj.weight": (outputs, inputs).
        ranks: size of the group.
        transposed: names of modules with a weight of shape [inputs, outputs], such as GPT-2's Conv1D.
    """
    found: dict[str, CutSide] = {}
    before: dict[str, CutSide] = {}
    turned = set(transposed)
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight":  # a bias is split with its weight's outputs
            if module not in found and f"{module}.weight" not in shapes:
                found[module or name] = "replicate"
            continue
        numbered = _NUMBER.search(f"{module}.")
        block = module[: numbered.end()] if numbered else ""
        axis = _axis_of(module, shape, before.get(block))
        outputs, inputs = (shape[1], shape[0]) if module in turned and len(shape) == 2 else (*shape, 1)[:2]
        if axis != "replicate" and (inputs if axis == "inputs" else outputs) % ranks:
            axis = "replicate"
        if axis in ("outputs", "inputs"):
            before[block] = axis
        found[module] = axis
    return found


def _axis_of(module: str, shape: tuple[int, ...], before: CutSide | None) -> CutSide:
    last = module.rpartition(".")[2]
    if len(shape) != 2 or _POSITIONS.search(module):
        return "replicate"
    if _EMBEDDING.search(module) or _HEAD.search(module):
        return "vocabulary"
    if _FIRST.match(last) or _FUSED.match(last):
        return "outputs"
    if _LAST.match(last):
        return "inputs"
    return "inputs" if before == "outputs" else "outputs"


def style_of(module: str, axis: CutSide) -> str:
    """Return the `torch.distributed.tensor.parallel` style for `axis` of `module`; "" if it is replicated.

    Split by the vocabulary, an embedding is row-parallel and the head, a linear, column-parallel.
    """
    if axis == "vocabulary":
        return "ColwiseParallel" if _HEAD.search(module) else "RowwiseParallel"
    return {"outputs": "ColwiseParallel", "inputs": "RowwiseParallel"}.get(axis, "")


def alike(axes: Mapping[str, CutSide]) -> Counter[tuple[str, CutSide]]:
    """Count modules by (name with block numbers as "*", axis)."""
    return Counter((_NUMBER.sub(".*.", f"{name}.").removesuffix("."), axis) for name, axis in axes.items())
