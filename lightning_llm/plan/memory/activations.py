"""Bytes that forward passes leave for their backward passes, part by part. Imports no torch."""

from typing import NamedTuple

from lightning_llm.config.schema import Config
from lightning_llm.model.attention.kinds import AttentionSpec
from lightning_llm.model.logit_chunks import rows_at_once
from lightning_llm.model.spec import ForwardPass, SavedTensor
from lightning_llm.model.structure import block_parts, mixer_of, norm_of
from lightning_llm.optim.state_bytes import DTYPE_BYTES
from lightning_llm.plan.attention_kernel import takes_blocks
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.memory.accounting import OURS, Accounting
from lightning_llm.plan.resolve import Plan
from lightning_llm.plan.stages import StagePart, layers_of
from lightning_llm.precision.native.express import NativeRecipe, express
from lightning_llm.precision.recipe.module_rules import reasons_to_stay_high, rule_of

CODE_BITS = {"delayed": 8.0, "current": 8.0, "subchannel": 8 + 32 / 128, "mxfp8": 8 + 8 / 32, "nvfp4": 4 + 8 / 16}
"""Bits per element of an operand as Transformer Engine keeps it for the backward pass: its codes along the contraction
axis of wgrad (a transpose of their own, but for scales per tensor), and their block scales."""


class BlockBytes(NamedTuple):
    """Bytes of one block on one rank and micro-batch: `kept` until its backward pass, and what that has beside them.

    The latter is what is recomputed, and the gradients of its activations.
    """

    kept: int
    backward: int


def on_gpu(plan: Plan) -> bool:
    """Return whether the planned devices run CUDA's kernels."""
    return plan.capability.compute_capability is not None


def forward_of(plan: Plan, accounting: Accounting = OURS) -> ForwardPass:
    """Return what the plan's forward passes run under. In a ring each rank keeps the keys of its own tokens alone."""
    data, width = plan.config.data, DTYPE_BYTES[plan.config.precision.compute_dtype]
    ranks = plan.degrees.sequence if accounting.gathers_context else 1
    return ForwardPass(width, data.sequence_length, data.document_mask, ranks, on_gpu(plan), takes_blocks(plan))


def tokens_of(config: Config, degrees: Degrees) -> int:
    """Return how many tokens of a micro-batch a rank computes, its tensor-parallel group together."""
    return config.data.micro_batch_size * config.data.sequence_length // degrees.sequence


def boundary_bytes(config: Config, degrees: Degrees) -> int:
    """Return the bytes of one micro-batch between two blocks, on one rank."""
    tokens = tokens_of(config, degrees) // (degrees.width if config.parallel.sequence_parallel else 1)
    return DTYPE_BYTES[config.precision.compute_dtype] * tokens * config.model.hidden_size


def recomputed_layers(config: Config, parts: list[StagePart]) -> list[int]:
    """Return the blocks of a rank's stages that recompute their forward pass, by global index."""
    return [index for index in layers_of(parts) if config.parallel.checkpointing_of(index) != "none"]


def part_bytes(plan: Plan, index: int, accounting: Accounting = OURS) -> dict[str, int]:
    """Return what each part of block `index` saves of one micro-batch on a rank, in bytes, by the part's name."""
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
    if mode == "selective":
        per_token = selective_bytes_per_token(config, index, degrees.width, accounting.every_product)
        kept += tokens_of(config, degrees) * per_token
    return BlockBytes(kept, whole + gradients)


def stage_bytes(plan: Plan, part: StagePart, accounting: Accounting = OURS) -> int:
    """Return what a stage saves of one micro-batch beside its blocks and the logits.

    That are the ids of tokens and positions where it embeds, tables of rotary angles and masks that its blocks share,
    and where it is the last the norm's and the head's input.
    """
    config, degrees, forward = plan.config, plan.degrees, forward_of(plan, accounting)
    model, tokens = config.model, tokens_of(config, degrees)
    positions = config.data.sequence_length // degrees.sequence
    found = part.first * 8 * (tokens + (positions if model.position == "learned" else 0))
    mixers = [mixer_of(model, index) for index in part.layers]
    if model.position == "rope" and not all(mixer.recurrent for mixer in mixers):
        found += 4 * model.attention_head_dim * positions
    found += _shared_mask_bytes(plan, part, forward)
    if part.last:
        found += sum(_bytes_of(plan, each) for each in norm_of(model).saved_tensors(model, forward))
        found += forward.width * model.hidden_size * tokens
    return found


def _shared_mask_bytes(plan: Plan, part: StagePart, forward: ForwardPass) -> int:
    """Return the bytes of the masks that say which keys a stage's queries see, a bool for each pair and window.

    Blocks that are recomputed keep them, and so does `cpu_kernel`'s kernel; others turn them into masks of their own
    (`attention.kinds.mask_of`). Where attention is plainly causal, on whole sequences without documents, there is none,
    nor for recurrent mixers. FlexAttention has lists of blocks, of no size beside these.
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
    """Return the bytes of `saved` on a rank; `prefix`: the part's name, to look up how its linears run."""
    config, degrees = plan.config, plan.degrees
    rows = tokens_of(config, degrees)
    if saved.per_position:
        rows = config.data.sequence_length // degrees.sequence
    if saved.split == "within" or (saved.split == "outside" and config.parallel.sequence_parallel):
        elements = rows * saved.elements // degrees.width
    else:
        elements = rows * saved.elements
    codes = [code_bits(plan, f"{prefix}.{linear}") for linear in saved.linears]
    as_it_is = saved.also or not codes or None in codes
    return elements * saved.width * as_it_is + sum(int(elements * bits / 8) for bits in codes if bits is not None)


def code_bits(plan: Plan, linear: str) -> float | None:
    """Return the bits per element of the input that `linear` keeps where it runs natively; None: the input as it is.

    What is emulated keeps the input, too, and quantises it again.
    """
    recipe, layers = plan.config.precision, plan.config.model.num_layers
    if plan.decision.runs != "native" or reasons_to_stay_high([linear], recipe, layers)[linear] is not None:
        return None
    native: NativeRecipe | None = express(recipe.casts_under(rule_of(linear, recipe.modules, layers)))[0]
    return None if native is None or native.gradient == "high" else CODE_BITS[native.kind]


def selective_bytes_per_token(config: Config, index: int, tp: int = 1, every_product: int = 1) -> int:
    """Return the bytes of the outputs that `parallel.blocks.checkpoint_blocks` keeps of one token in block `index`.

    Those are every linear's in the compute dtype (of `every_product`-th ones alone, see `Accounting`), and of the mixer
    what its kernel gives (`Part.kernel_outputs`).
    """
    model, width = config.model, DTYPE_BYTES[config.precision.compute_dtype]
    parts = block_parts(model, index).values()
    linears = [linear for part in parts for linear in part.linears(model)]
    products = [width * linear.outputs.length // (tp if linear.role == "column" else 1) for linear in linears]
    kernels = (part.kernel_outputs(model, width, config.data.sequence_length) // tp for part in parts)
    return sum(products[::every_product]) + sum(kernels)


def _gradient_bytes(plan: Plan, index: int, accounting: Accounting) -> int:
    """Return the bytes of the gradients that the backward pass of block `index` has at once, at most.

    Where two factors of a product get theirs from the product's: of the widest tensor that a part saves three times,
    less the product itself, which its own linear has let go; and of the residual stream, and what enters the part.
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
    """A micro-batch's `rows` of `width` logits on a rank, of which `at_once` are there at once, in `number` chunks."""

    rows: int
    width: int
    at_once: int

    @property
    def number(self) -> int:
        """Chunks, 1 where logits are there whole."""
        return -(-self.rows // self.at_once)


def loss_chunks(config: Config, degrees: Degrees, on_gpu: bool) -> LossChunks:
    """Return them: whole where others want logits, a pipeline's schedule or a distillation."""
    rows, width = tokens_of(config, degrees), config.model.padded_vocab_size // degrees.width
    whole = degrees.pp > 1 or config.distil is not None
    kind = "cuda" if on_gpu else "cpu"
    return LossChunks(rows, width, rows if whole else rows_at_once(rows, config.model.hidden_size, width, kind))
