"""One rank's operands of a cut linear, compared with those of a single process quantized separately."""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from lightning_llm.base.keyed_hash import StepKey
from lightning_llm.config.schema import Config
from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.cp import positions_of
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.operand_shards import place_shards
from lightning_llm.plan.degrees import Degrees, resolve_degrees
from lightning_llm.plan.divisibility import CONTRACTION
from lightning_llm.precision.cast.inductor import Backend
from lightning_llm.precision.linear.module import quantized_layers, set_step_key
from lightning_llm.precision.linear.operands import LinearCall
from lightning_llm.precision.linear.plan import LinearPlan
from lightning_llm.precision.linear.swap import swap_linears

BATCH = 2
BY_DEFINITION = {
    "column": {"x": None, "w": 0, "dy": 1},  # Y_r = X W_r^T
    "row": {"x": 1, "w": 1, "dy": None},  # Y = sum of X_r W_r^T
    "duplicate": {"x": None, "w": None, "dy": None},  # Y = X W^T on every rank, the first's dX counts
}
"""The axis of x [M, K], w [N, K] and dy [M, N] that tensor parallelism cuts, from arXiv 1909.08053, section 3, not from
the code under test."""


def words_of(recipe: str) -> list[str]:
    """Return the overrides of a layout of tp = 2 x cp = 2 with shards that fit the recipe's blocks."""
    width, length = (256, 512) if "subchannel" in recipe else (128, 256)  # blocks of 128, rotations of 64
    return [
        f"precision={recipe}", "parallel=fsdp_cp_tp", "trainer.devices=4", "model.num_layers=3", "model.num_heads=2",
        "model.num_kv_heads=2", f"model.hidden_size={width}", f"model.ffn_hidden_size={width}", "model.vocab_size=256",
        f"data.sequence_length={length}", f"model.max_sequence_length={length}",
    ]  # fmt: skip


def whole_tensors(config: Config, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return x, w and dy as one process has them; outliers make tensor-level scales differ from shard to shard."""
    width, rows = config.model.hidden_size, BATCH * config.data.sequence_length
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, count in (("x", rows), ("w", width), ("dy", rows)):
        tensor = torch.randn(count, width, generator=generator)
        tensor[7, 5] = 11.0
        tensors[name] = tensor.to(dtype)
    return tensors


def differing(
    config: Config, layout: Layout, scope: str, backend: Backend, slots: Collection[str] = tuple(CONTRACTION)
) -> list[str]:
    """Return "recipe role slot" of this rank's operands that are not the whole's part, of a column and a row linear."""
    dtype = torch.float16 if config.precision.compute_dtype == "fp16" else torch.bfloat16
    with torch.device("meta"):
        model = Decoder(config.model)
    swap_linears(model, config.precision, config.model.num_layers, "cpu", backend)
    length = config.data.sequence_length
    place_shards(model, layout, length, torch.device("cpu"))
    set_step_key(model.to_empty(device="cpu"), StepKey(seed=1, step=2, micro_batch=3))
    whole, found = whole_tensors(config, dtype), []
    layers = {layer.name: layer for layer in quantized_layers(model)}
    for name, role in (("layers.1.attention.q_proj", "column"), ("layers.1.attention.o_proj", "row")):
        layer = layers[name]
        casts = {slot: cast.model_copy(update={"amax_scope": scope}) for slot, cast in layer.plan.casts.items()}
        plan = replace(layer.plan, casts=casts)
        scales = torch.tensor([1.5, 0.75, 3.0])
        shards, one = LinearCall(plan, layer.keys, scales), LinearCall(LinearPlan(casts, "eager"), layer.keys, scales)
        for slot in slots:
            operand = slot.rpartition(".")[2]

            def part(tensor: Tensor, operand: str = operand, role: str = role) -> Tensor:
                return _own(tensor, operand, role, layout, length)

            ours = shards.operand(part(whole[operand]), slot, CONTRACTION[slot]).dequantized()
            theirs = one.operand(whole[operand], slot, CONTRACTION[slot]).dequantized()
            if not torch.equal(ours, part(theirs)):
                found.append(f"{config.precision.name} {role} {slot}")
    return found


def _own(tensor: Tensor, operand: str, role: str, layout: Layout, length: int) -> Tensor:
    """Return this rank's part of x [M, K], w [N, K] or dy [M, N]: plain slicing, by the definition of the roles."""
    if operand != "w":
        positions = positions_of(layout.coordinates.cp, 2, length)
        tensor = tensor.unflatten(0, (BATCH, length))[:, positions].flatten(0, 1)
    axis = BY_DEFINITION[role][operand]
    return (tensor if axis is None else tensor.chunk(2, axis)[layout.coordinates.tp]).contiguous()


def degrees_of(config: Config) -> Degrees:
    return resolve_degrees(config.parallel, 4)
