"""Bytes of activations saved for backward, part by part. Imports no torch."""

from typing import NamedTuple

from lightning_llm.config.schema import Config
from lightning_llm.model.attention.kinds import AttentionSpec
from lightning_llm.model.flops import rows_at_once
from lightning_llm.model.spec import ForwardPass, SavedTensor
from lightning_llm.model.structure import block_parts, feed_forward_of, linears_of, mixer_of, norm_of
from lightning_llm.optim.kinds import DTYPE_BYTES
from lightning_llm.plan.attention_kernel import takes_blocks
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.memory import OURS, Accounting
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.stages import StagePart, layers_of
from lightning_llm.precision.module_rules import alike_experts, reasons_to_stay_unquantized, rule_in_effect
from lightning_llm.precision.native.express import NativeRecipe, express

STATE_WIDTH = 4
"""Bytes of an element of the state that a router takes from the block before: fp32."""


class BlockBytes(NamedTuple):
    """Bytes of one block on one rank and micro-batch: `kept` until its backward pass, and added by it (`backward`).

    The backward pass adds recomputed activations and the gradients of activations.
    """

    kept: int
    backward: int


def on_gpu(plan: Plan) -> bool:
    """Return whether the planned devices are CUDA GPUs."""
    return plan.capability.compute_capability is not None


def forward_of(plan: Plan, accounting: Accounting = OURS) -> ForwardPass:
    """Return the conditions of the plan's forward passes, on which the bytes saved for backward depend."""
    data, width = plan.config.data, DTYPE_BYTES[plan.config.precision.compute_dtype]
    ranks = plan.degrees.sequence if accounting.gathers_context else 1
    return ForwardPass(width, data.sequence_length, data.document_mask, ranks, on_gpu(plan), takes_blocks(plan))


def tokens_of(config: Config, degrees: Degrees) -> int:
    """Return the tokens of a micro-batch that a rank's tensor-parallel group computes."""
    return config.data.micro_batch_size * config.data.sequence_length // degrees.sequence


def boundary_bytes(config: Config, degrees: Degrees) -> int:
    """Return the bytes of the hidden states of one micro-batch between two blocks, on one rank."""
    tokens = tokens_of(config, degrees) // (degrees.width if config.parallel.sequence_parallel else 1)
    return DTYPE_BYTES[config.precision.compute_dtype] * tokens * config.model.hidden_size


def recomputed_layers(config: Config, parts: list[StagePart]) -> list[int]:
    """Return the blocks of a rank's stages that recompute their forward pass, by global index."""
    return [index for index in layers_of(parts) if config.parallel.checkpointing_of(index) != "none"]


def part_bytes(plan: Plan, index: int, accounting: Accounting = OURS) -> dict[str, int]:
    """Return {part of block `index`: bytes of activations that it saves for one micro-batch on a rank}."""
    forward, found = forward_of(plan, accounting), {}
    for name, part in block_parts(plan.config.model, index).items():
        prefix = f"layers.{index}.{name}"
        saved = part.saved_tensors(plan.config.model, forward)
        found[name] = sum(_bytes_of(plan, each, prefix) for each in saved)
    return found


def block_bytes(plan: Plan, index: int, accounting: Accounting = OURS) -> BlockBytes:
    """Return the bytes of block `index` of one micro-batch on a rank."""
    config, degrees = plan.config, plan.degrees
    whole, gradients = sum(part_bytes(plan, index, accounting).values()), _gradient_bytes(plan, index, accounting)
    mode = config.parallel.checkpointing_of(index)
    if mode == "none":
        return BlockBytes(whole, gradients)
    kept = boundary_bytes(config, degrees)
    kept += STATE_WIDTH * tokens_of(config, degrees) * feed_forward_of(config.model, index).state_taken(config.model)
    if mode == "selective":
        per_token = selective_bytes_per_token(config, index, degrees.width, accounting.every_product)
        kept += tokens_of(config, degrees) * per_token
    return BlockBytes(kept, whole + gradients)


def stage_bytes(plan: Plan, part: StagePart, accounting: Accounting = OURS) -> int:
    """Return the bytes that a stage saves for one micro-batch outside of its blocks, without the logits.

    These are the ids of tokens and positions in the first stage, the rotary tables and masks that the blocks of a stage
    share, and the inputs of the last norm and the head in the last stage.
    """
    config, degrees, forward = plan.config, plan.degrees, forward_of(plan, accounting)
    model, tokens = config.model, tokens_of(config, degrees)
    positions = config.data.sequence_length // degrees.sequence
    found = part.first * 8 * (tokens + (positions if model.position == "learned" else 0))
    mixers = [mixer_of(model, index) for index in part.layers]
    if model.position == "rope":
        found += 4 * sum({mixer.rope_width(model) for mixer in mixers}) * positions
    found += _shared_mask_bytes(plan, part, forward)
    if part.last:
        found += sum(_bytes_of(plan, each) for each in norm_of(model).saved_tensors(model, forward))
        found += forward.width * model.hidden_size * tokens
    return found


def _shared_mask_bytes(plan: Plan, part: StagePart, forward: ForwardPass) -> int:
    """Return the bytes of a stage's shared attention masks: a bool for each pair of query and key, per window size.

    Recomputed blocks keep them, and so does the kernel of `cpu_kernel`; others convert them
    (`attention.kinds.mask_of`). Causal attention over whole sequences without documents needs none, nor do recurrent
    mixers. FlexAttention's lists of blocks are negligible.
    """
    config = plan.config
    again, windows = set(recomputed_layers(config, [part])), set()
    for index in part.layers:
        mixer = mixer_of(config.model, index)
        if not isinstance(mixer, AttentionSpec) or not mixer.is_masked(forward):
            continue
        if forward.by_blocks and mixer.takes_kernels:
            continue
        if index in again or mixer.keeps_shared_mask(forward):
            windows.add(mixer.window_tokens(config.model))
    sequences = config.data.micro_batch_size if config.data.document_mask else 1
    return len(windows) * sequences * config.data.sequence_length**2 // plan.degrees.sequence


def _bytes_of(plan: Plan, saved: SavedTensor, prefix: str = "") -> int:
    """Return the bytes of `saved` on a rank; `prefix`: the part's name, to look up the casts of its linears."""
    config, degrees = plan.config, plan.degrees
    rows = tokens_of(config, degrees)
    if saved.per_position:
        rows = config.data.sequence_length // degrees.sequence
    if saved.split == "within" or (saved.split == "outside" and config.parallel.sequence_parallel):
        elements = rows * saved.elements // degrees.width
    else:
        elements = rows * saved.elements
    parts = [code_parts(plan, f"{prefix}.{linear}") for linear in saved.linears]
    uncoded = [sum(share for bits, share in each if bits is None) for each in parts]
    as_it_is = 1 if saved.also or not parts else max(uncoded)
    codes = (int(elements * share * bits / 8) for each in parts for bits, share in each if bits is not None)
    return int(elements * saved.width * as_it_is) + sum(codes)


def code_parts(plan: Plan, linear: str) -> list[tuple[float | None, float]]:
    """Return (`code_bits`, share of experts) for each group of experts of `linear` under the same rules."""
    if plan.decision.runs != "native":
        return [(None, 1.0)]
    model = plan.config.model
    experts = linears_of(model)[linear].groups
    groups = alike_experts(linear, experts, plan.config.precision, model.num_layers)
    return [(code_bits(plan, place), count / experts) for place, count in groups]


def code_bits(plan: Plan, linear: str) -> float | None:
    """Return the bits per element in which a native `linear` saves its input for wgrad; None: it saves no codes.

    Transformer Engine saves codes along wgrad's contraction axis (a separate transpose, except with scales per tensor)
    and their block scales. Emulated linears save the input and quantize it again.
    """
    recipe, layers = plan.config.precision, plan.config.model.num_layers
    if plan.decision.runs != "native" or reasons_to_stay_unquantized([linear], recipe, layers)[linear] is not None:
        return None
    casts = recipe.casts_under(rule_in_effect(linear, recipe, layers))
    native: NativeRecipe | None = express(casts)[0]
    return None if native is None or native.gradient == "high" else casts["wgrad.x"].stored_bits


def selective_bytes_per_token(config: Config, index: int, tp: int = 1, every_product: int = 1) -> int:
    """Return the bytes per token of the outputs that `parallel.apply.checkpoint_blocks` keeps in block `index`.

    These are the outputs of every linear in the compute dtype (of every n-th one, see `Accounting.every_product`), and
    of the mixer's kernel (`Part.kernel_outputs`).
    """
    model, width = config.model, DTYPE_BYTES[config.precision.compute_dtype]
    parts = block_parts(model, index).values()
    linears = [linear for part in parts for linear in part.linears(model)]
    products = [
        width * linear.per_token * linear.outputs.length // (tp if linear.role in ("column", "expert") else 1)
        for linear in linears
    ]
    kernels = (part.kernel_outputs(model, width, config.data.sequence_length) // tp for part in parts)
    return sum(products[::every_product]) + sum(kernels)


def _gradient_bytes(plan: Plan, index: int, accounting: Accounting) -> int:
    """Return the peak bytes of activation gradients in the backward pass of block `index`.

    The peak is where two factors of a product get their gradients: two times the widest tensor that a part saves (the
    product itself has been freed), the residual stream, and the part's input.
    """
    config, degrees, forward = plan.config, plan.degrees, forward_of(plan, accounting)
    widest = 0
    for part in block_parts(config.model, index).values():
        for saved in part.saved_tensors(config.model, forward):
            if saved.split == "within" and saved.width == forward.width:
                widest = max(widest, _bytes_of(plan, saved._replace(linears=())))
    whole = forward.width * tokens_of(config, degrees) * config.model.hidden_size
    return 2 * widest + whole + boundary_bytes(config, degrees)


class LossChunks(NamedTuple):
    """Chunks of a micro-batch's logits on a rank: `rows` of `width`, at most `at_once` rows in memory."""

    rows: int
    width: int
    at_once: int

    @property
    def number(self) -> int:
        """Number of chunks; 1 if all logits are in memory at once."""
        return -(-self.rows // self.at_once)


def loss_chunks(config: Config, degrees: Degrees, on_gpu: bool) -> LossChunks:
    """Return the chunks of logits: a single one if a pipeline's schedule or distillation needs all logits."""
    rows, width = tokens_of(config, degrees), config.model.padded_vocab_size // degrees.width
    whole = degrees.pp > 1 or config.distil is not None
    kind = "cuda" if on_gpu else "cpu"
    return LossChunks(rows, width, rows if whole else rows_at_once(rows, config.model.hidden_size, width, kind))
