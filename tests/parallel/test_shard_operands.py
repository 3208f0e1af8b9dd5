"""Operands of cut linears are the parts of a single process's, bit for bit, whatever the recipe. 10 seconds.

Ranks are tp = 2 x cp = 2. Each quantises its part of x, w and dy for every slot, and compares with the whole.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from traced_run import leave_groups, run_with

from lightning_llm.compose import compose_config
from lightning_llm.keyed_hash import StepKey
from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.context import positions_of
from lightning_llm.parallel.divisibility import CONTRACTION, cut_problems
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.quantised import CUT_COLUMNS, place_shards
from lightning_llm.precision.linear import LinearPlan, _Call
from lightning_llm.precision.module import quantised_layers, set_step_key
from lightning_llm.precision.swap import swap_linears
from lightning_llm.schema import Config
from lightning_llm.schema.precision import slots_of

RECIPES = sorted(
    file.stem
    for file in (Path(__file__).parents[2] / "conf" / "precision").glob("*.yaml")
    if compose_config([f"precision={file.stem}"]).precision.quantises
)
BATCH = 2


def words_of(recipe: str) -> list[str]:
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


def differing_slots(configs: list[Config], scope: str) -> list[str]:
    """Return "recipe role slot rank" of every operand that is not the whole's part; all ranks must call it."""
    layout = Layout.of(configs[0].parallel, torch.device("cpu"))
    found = [each for config in configs for each in _differing(config, layout, scope)]
    everyone: list[Any] = [None] * layout.degrees.world
    torch.distributed.all_gather_object(everyone, found)
    leave_groups(layout)
    return [each for rank in everyone for each in rank]


def _differing(config: Config, layout: Layout, scope: str) -> list[str]:
    dtype = torch.float16 if config.precision.compute_dtype == "fp16" else torch.bfloat16
    with torch.device("meta"):
        model = Decoder(config.model)
    swap_linears(model, config.precision, config.model.num_layers, "cpu", backend="eager")
    length = config.data.sequence_length
    place_shards(model, layout, length, torch.device("cpu"))
    set_step_key(model.to_empty(device="cpu"), StepKey(seed=1, step=2, micro_batch=3))
    whole, found = whole_tensors(config, dtype), []
    layers = {layer.name: layer for layer in quantised_layers(model)}
    for name, role in (("layers.1.attention.q_proj", "column"), ("layers.1.attention.o_proj", "row")):
        layer = layers[name]
        casts = {slot: cast.model_copy(update={"amax_scope": scope}) for slot, cast in layer.plan.casts.items()}
        plan = replace(layer.plan, casts=casts)
        scales = torch.tensor([1.5, 0.75, 3.0])
        shards, one = _Call(plan, layer.keys, scales), _Call(LinearPlan(casts, "eager"), layer.keys, scales)
        for slot, axis in CONTRACTION.items():
            operand = slot.rpartition(".")[2]

            def part(tensor: Tensor, operand: str = operand, role: str = role) -> Tensor:
                return _own(tensor, operand, role, layout, length)

            ours = shards.operand(part(whole[operand]), slot, axis).dequantised()
            theirs = one.operand(whole[operand], slot, axis).dequantised()
            if not torch.equal(ours, part(theirs)):
                found.append(f"{config.precision.name} {role} {slot}")
    return found


def _own(tensor: Tensor, operand: str, role: str, layout: Layout, length: int) -> Tensor:
    """Return this rank's part of x [M, K], w [N, K] or dy [M, N]: plain slicing, by the definition of the roles."""
    if operand != "w":
        positions = positions_of(layout.place.cp, 2, length)
        tensor = tensor.unflatten(0, (BATCH, length))[:, positions].flatten(0, 1)
    if operand in CUT_COLUMNS[role]:
        return tensor.chunk(2, 1)[layout.place.tp].contiguous()
    return tensor.chunk(2, 0)[layout.place.tp].contiguous() if operand == "w" else tensor.contiguous()


def test_operands_are_the_parts_of_one_process(ranks):
    configs = [compose_config(words_of(recipe)) for recipe in RECIPES]
    degrees = Layout(configs[0].parallel, compose_degrees(configs[0])).degrees
    assert [str(problem) for config in configs for problem in cut_problems(config, degrees)] == []
    assert ranks(4).call(differing_slots, configs, "logical") == []


def test_shard_scope_takes_the_scale_of_the_shard(ranks):
    """What Transformer Engine does natively, and why the scope that is the default asks the other ranks."""
    config = compose_config(words_of("fp8_current_e4m3"))
    differing = ranks(4).call(differing_slots, [config], "shard")
    quantised = {slot for slot, cast in slots_of(config.precision).items() if cast.quantises}
    assert {each.split()[2] for each in differing} == quantised


def first_operands(config: Config) -> list[Tensor]:
    """Return what the first quantised GEMM of a run multiplies on rank 0: x and w, of the first micro-batch."""
    kept: list[Tensor] = []
    operand = _Call.operand

    def noted(call: _Call, x: Tensor, slot: str, axis: int) -> Any:
        made = operand(call, x, slot, axis)
        if len(kept) < 2:
            kept.append(made.dequantised())
        return made

    _Call.operand = noted
    try:
        run_with(config)
    finally:
        _Call.operand = operand
    return kept


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_current"])
def test_the_first_operands_of_a_run_are_the_parts_of_one_rank(recipe, ranks, small_run, tmp_path):
    """Within training, too: embedding, norm and gathering leave x at step 1 as one rank has it."""

    def run(layout: str, world: int) -> list[Tensor]:
        words = [f"parallel={layout}", f"trainer.devices={world}", f"precision={recipe}", "precision.casts=eager"]
        words += ["model.num_heads=4", "model.num_kv_heads=4", "model.hidden_size=64", "model.num_layers=3"]
        words += ["trainer.max_steps=1", "schedule=constant", "schedule.warmup_steps=0", "data.sequence_length=64"]
        words += ["precision.modules.first_blocks_high=0"]  # further on, sums in another order have been before
        made = ranks(world).call(first_operands, compose_config(small_run(tmp_path / layout, *words)))
        ranks(world).close()  # as in test_model_parallel.py
        return made

    x, w = run("single", 1)
    tensor_x, tensor_w = run("tp", 2)
    context_x, context_w = run("cp", 2)
    assert torch.equal(tensor_x, x)
    assert torch.equal(tensor_w, w.chunk(2)[0])
    own = x.unflatten(0, (2, 64))[:, positions_of(0, 2, 64)].flatten(0, 1)  # 2 sequences in a micro-batch
    assert torch.equal(context_x, own)
    assert torch.equal(context_w, w)


def compose_degrees(config: Config) -> Any:
    from lightning_llm.parallel.degrees import resolve_degrees

    return resolve_degrees(config.parallel, 4)


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        ("mxfp8", ["model.num_kv_heads=1"], "num_kv_heads = 1"),
        ("mxfp8", ["model.head_dim=48"], "96 / 2 = 48 long, no multiple of 32"),
        ("mxfp4_sr", ["data.sequence_length=192"], "rotations of 64"),
    ],
)
def test_blocks_that_a_shard_would_cut_are_refused(recipe, words, said):
    config = compose_config([*words_of(recipe), *words])
    problems = [str(problem) for problem in cut_problems(config, compose_degrees(config))]
    assert any(said in problem for problem in problems), problems
