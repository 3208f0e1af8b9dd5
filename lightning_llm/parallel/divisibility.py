"""What tensor and context parallelism cut, and whether it divides: said with the arithmetic. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_llm.errors import Problem
from lightning_llm.model.linear_names import linear_names
from lightning_llm.parallel.degrees import Degrees
from lightning_llm.precision.module_rules import reasons_to_stay_high
from lightning_llm.schema import Config, ModelConfig
from lightning_llm.schema.precision import CastConfig, PhaseConfig, PrecisionConfig, slots_of

CONTRACTION = {"fprop.x": 1, "fprop.w": 1, "dgrad.dy": 1, "dgrad.w": 0, "wgrad.dy": 0, "wgrad.x": 0}
"""The axis of each slot's operand (x [M, K], w [N, K], dy [M, N]) that its GEMM sums over."""


@dataclass(frozen=True)
class Cut:
    """An axis of length `whole` that ranks hold in parts of `part`; `text` says what it is and who cuts it."""

    text: str
    whole: int
    part: int


def cut_problems(config: Config, degrees: Degrees) -> Iterator[Problem]:
    """Yield everything that the tensor- and context-parallel ranks of `degrees` do not divide."""
    if degrees.cp > 1 and degrees.pp > 1:
        yield Problem(
            "parallel.cp", f"is {degrees.cp} with pp={degrees.pp}; stages take whole sequences. Set one to 1."
        )
    found = [*_weight_problems(config.model, degrees.tp), *_sequence_problems(config, degrees)]
    yield from found
    if not found and degrees.tp * degrees.cp > 1:
        yield from _block_problems(config, degrees)


def _weight_problems(model: ModelConfig, tp: int) -> Iterator[Problem]:
    sizes = {
        "model.num_heads": (model.num_heads, "each rank takes whole heads"),
        "model.num_kv_heads": (model.num_kv_heads, "each rank takes whole key/value heads, which are not copied"),
        "model.ffn_hidden_size": (model.ffn_hidden_size, "its columns are shared out evenly"),
        "the padded vocabulary": (model.padded_vocab_size, "its rows are shared out; see model.vocab_multiple"),
    }
    for name, (size, why) in sizes.items():
        if size % tp:
            text = (
                f"is {tp}, which does not divide {name} = {size} ({size} = {size // tp} x {tp} + {size % tp}): {why}."
            )
            yield Problem("parallel.tp", f"{text} Take a divisor of {size}.")


def _sequence_problems(config: Config, degrees: Degrees) -> Iterator[Problem]:
    length, cp, tp = config.data.sequence_length, degrees.cp, degrees.tp
    if cp > 1 and length % (2 * cp):
        text = f"is {length}, and cp={cp} cuts sequences into 2 x {cp} chunks; take a multiple of {2 * cp}."
        yield Problem("data.sequence_length", text)
    elif tp > 1 and config.parallel.sequence_parallel and length // cp % tp:
        text = (
            f"is {length}, of which {cp} context-parallel rank(s) have {length // cp} tokens each, and tp={tp} does "
            f"not divide those. Take a multiple of {cp * tp}, or set parallel.sequence_parallel=false."
        )
        yield Problem("data.sequence_length", text)


def _block_problems(config: Config, degrees: Degrees) -> Iterator[Problem]:
    """Yield each slot that has blocks or rotations which a shard would cut: they would be others than one rank's."""
    model, recipe = config.model, config.precision
    reasons = reasons_to_stay_high(linear_names(model), recipe, model.num_layers)
    names = sorted({name.rpartition(".")[2] for name, reason in reasons.items() if reason is None and "." in name})
    parts: list[PrecisionConfig | PhaseConfig] = [recipe, *recipe.phases]
    found = {
        (f"precision.{slot}", text): None
        for part in parts
        for slot, cast in slots_of(part).items()
        if cast.quantises
        for axis, cut in _cuts(slot.rpartition(".")[2], names, config, degrees)
        for text in _cut_texts(cast, axis == CONTRACTION[slot], cut)
    }
    yield from (Problem(*each) for each in found)


def _cut_texts(cast: CastConfig, contraction: bool, cut: Cut) -> Iterator[str]:
    rotated = cast.hadamard.size if cast.hadamard is not None and contraction else 1
    for size, what in (
        (_extent(cast.block, contraction), f"blocks of {cast.block}"),
        (rotated, f"rotations of {rotated}"),
    ):
        if cut.part % size:
            share = f"{cut.whole} / {cut.whole // cut.part} = {cut.part}"
            yield f"has {what}, and each part of {cut.text} is {share} long, no multiple of {size}. Cut it less."


def _extent(block: str, contraction: bool) -> int:
    """Return how many elements of an axis a block spans; its last number lies along the contraction axis."""
    if block == "tensor":
        return 1
    across, along = (int(each) for each in block.split("x"))
    return along if contraction else across


def _cuts(operand: str, names: list[str], config: Config, degrees: Degrees) -> Iterator[tuple[int, Cut]]:
    """Yield the axes of `operand` (x [M, K], w [N, K], dy [M, N]) of linears `names` that ranks have parts of."""
    model, tp, cp, length = config.model, degrees.tp, degrees.cp, config.data.sequence_length
    if cp > 1 and operand != "w":
        yield 0, Cut(f"a sequence (cp={cp}, two per rank)", length, length // (2 * cp))
    if tp == 1:
        return
    query, key = (count * model.attention_head_dim for count in (model.num_heads, model.num_kv_heads))
    ffn = model.ffn_hidden_size
    outputs = {"q_proj": query, "k_proj": key, "v_proj": key, "gate_proj": ffn, "up_proj": ffn}  # column-parallel
    inputs = {"o_proj": query, "down_proj": ffn}  # row-parallel
    for widths, side, axes in ((outputs, "outputs", {"w": 0, "dy": 1}), (inputs, "inputs", {"x": 1, "w": 1})):
        for width in dict.fromkeys(widths.values()):
            cut = [name for name in names if widths.get(name) == width]
            if cut and operand in axes:
                yield axes[operand], Cut(f"the {side} of {', '.join(cut)} (tp={tp})", width, width // tp)
