"""Sums of gradients over ranks that are sent as codes: `precision.gradient_reduction`.

A message contains a rank's gradients of another rank's part, cast in blocks of consecutive elements: first the scales,
then the codes. The receiver adds the decoded messages of all ranks, its own included, in fp32 and in the order of the
tree (`parallel.tree`), so every rank's sum is rounded to codes once and nothing else is. In place of the scale of a
block with Inf or NaN there is NaN, so an overflow is not lost in a saturating cast.
"""

from collections.abc import Generator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_llm.config.schema.precision import CastConfig
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.tree import Scatter, TreeSum, tree_reduce_scatter
from lightning_llm.plan.gradient_codes import block_width, message_bytes
from lightning_llm.precision.cast.rounding import decode, encode, round_to_format
from lightning_llm.precision.cast.scales import E8M0_NAN, e8m0_value, scale_blocks

ELEMENTS_AT_ONCE = 2**20
"""Elements that are cast together: bounds the temporary tensors."""


def scatter_of(layout: Layout, *axes: str) -> Scatter:
    """Return the reduce-scatter of gradients over `axes` of `layout`: in tree order, sent as they are or as codes."""
    if layout.gradient_cast is not None:
        return partial(coded_reduce_scatter, cast=layout.gradient_cast)
    return partial(tree_reduce_scatter, subtrees=layout.subtrees(*axes))


def coded_reduce_scatter(
    tensor: Tensor, group: dist.ProcessGroup, cast: CastConfig
) -> Generator[dist.Work, None, Tensor]:
    """Return this rank's part [n], fp32, of the sum over `group` of `tensor` [ranks * n], which is sent as codes.

    Yields the all-to-all after starting it; resume after waiting for it.
    """
    parts = tensor.view(group.size(), -1)
    sent = torch.stack([encode_message(part, cast) for part in parts])
    received = torch.empty_like(sent)
    yield dist.all_to_all_single(received, sent, group=group, async_op=True)
    return sum_messages(received, parts.shape[1], cast)


def encode_message(part: Tensor, cast: CastConfig) -> Tensor:
    """Return `part` [n] as a message, uint8 [`message_bytes`]."""
    width, bits = block_width(cast), cast.number_format.code_bits
    blocks = -(-len(part) // width)
    message = torch.empty(message_bytes(cast, len(part)), dtype=torch.uint8, device=part.device)
    scales, codes = message.split([blocks * cast.scale_kind.stored_bits // 8, blocks * width * bits // 8])
    first_scale = first_code = 0
    for piece in part.split(_elements_at_once(width)):
        its_scales, its_codes = _encoded(piece, cast, width)
        scales.narrow(0, first_scale, len(its_scales)).copy_(its_scales)
        codes.narrow(0, first_code, len(its_codes)).copy_(its_codes)
        first_scale, first_code = first_scale + len(its_scales), first_code + len(its_codes)
    return message


def sum_messages(messages: Tensor, elements: int, cast: CastConfig) -> Tensor:
    """Return the tree sum, fp32 [`elements`], of the gradients in `messages` [ranks, bytes], one per rank."""
    width, bits = block_width(cast), cast.number_format.code_bits
    blocks = -(-elements // width)
    scale_bytes, step = cast.scale_kind.stored_bits // 8, _elements_at_once(width) // width
    scales, codes = messages.split([blocks * scale_bytes, blocks * width * bits // 8], 1)
    total = torch.empty(blocks * width, device=messages.device)
    for first in range(0, blocks, step):
        count, block_bytes = min(step, blocks - first), width * bits // 8
        its_scales = scales.narrow(1, first * scale_bytes, count * scale_bytes)
        its_codes = codes.narrow(1, first * block_bytes, count * block_bytes)
        tree = TreeSum()
        for rank, (scale, code) in enumerate(zip(its_scales, its_codes, strict=True)):
            node = [_decoded(scale, code, cast, width)]
            if rank < len(messages) - 1:
                tree.push(node, level=0)
            else:
                tree.close(node)
                total.narrow(0, first * width, count * width).copy_(node[0])
    return total.narrow(0, 0, elements)


def _elements_at_once(width: int) -> int:
    return max(1, ELEMENTS_AT_ONCE // width) * width


def _encoded(x: Tensor, cast: CastConfig, width: int) -> tuple[Tensor, Tensor]:
    """Return (bytes of the scales, bytes of the codes) of `x` [n], uint8."""
    blocks = F.pad(x.float(), (0, -len(x) % width)).view(1, -1, width)
    scaled = scale_blocks(blocks, cast, (1, width))
    codes = encode(round_to_format(blocks * scaled.multiplier, cast.number_format, cast.rounding), cast.number_format)
    if scaled.block is None:
        raise ValueError(f"scale: {cast.scale} has no scale per block")
    finite, stored = torch.isfinite(blocks).all(2, keepdim=True), cast.scale_kind.stored(scaled)
    if cast.scale_kind.shares_exponent:
        scales = torch.where(finite, stored, E8M0_NAN).to(torch.uint8)
    else:
        scales = torch.where(finite, scaled.block, torch.nan)
    return scales.flatten().view(torch.uint8), _packed(codes.flatten(), cast)


def _decoded(scales: Tensor, codes: Tensor, cast: CastConfig, width: int) -> Tensor:
    """Return the gradients, fp32 [n], of `_encoded` bytes: value times scale, rounded once."""
    aligned = scales.clone()  # begins at a multiple of four bytes
    factor = e8m0_value(aligned.int()) if cast.scale_kind.shares_exponent else aligned.view(torch.float32)
    values = decode(_unpacked(codes, cast), cast.number_format).view(-1, width)
    return (values * factor[:, None]).flatten()


def _packed(codes: Tensor, cast: CastConfig) -> Tensor:
    """Return 4-bit `codes` in pairs, the first in the low half of a byte; 8-bit ones as they are."""
    if cast.number_format.code_bits == 8:
        return codes
    first, second = codes.view(-1, 2).unbind(1)
    return first | (second << 4)


def _unpacked(packed: Tensor, cast: CastConfig) -> Tensor:
    if cast.number_format.code_bits == 8:
        return packed
    return torch.stack([packed & 15, packed >> 4], 1).flatten()
