"""Operands of cut linears are the parts of a single process's, bit for bit, whatever the recipe. 15 seconds.

First by themselves: ranks are tp = 2 x cp = 2, and each quantises its part of x, w and dy for every slot. Then within a
run: what ranks were given is put together and quantised as a whole.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from traced_run import layout_here, run_with

from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.precision import slots_of
from lightning_llm.keyed_hash import StepKey
from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.context import positions_of
from lightning_llm.parallel.layout import Layout
from lightning_llm.parallel.quantised import place_shards
from lightning_llm.plan.divisibility import CONTRACTION, sharding_problems
from lightning_llm.plan.shard_axes import SHARD_AXES
from lightning_llm.precision import inductor
from lightning_llm.precision.inductor import Backend
from lightning_llm.precision.linear import LinearPlan, _Call
from lightning_llm.precision.module import QuantisedLinear, quantised_layers, set_step_key
from lightning_llm.precision.swap import swap_linears
from tests.precision.recipes import RECIPES as ALL_RECIPES
from tests.precision.recipes import load

RECIPES = [name for name in ALL_RECIPES if load(name).quantises]
MIX = 'precision.modules.casts=[{names: ["*.o_proj"], recipe: mxfp4_sr}]'
BATCH = 2
BY_DEFINITION = {
    "column": {"x": None, "w": 0, "dy": 1},  # Y_r = X W_r^T
    "row": {"x": 1, "w": 1, "dy": None},  # Y = sum of X_r W_r^T
    "duplicate": {"x": None, "w": None, "dy": None},  # Y = X W^T on every rank, the first's dX counts
}
"""Which axis of x [M, K], w [N, K] and dy [M, N] tensor parallelism cuts: by arXiv 1909.08053, section 3, not by the
code under test."""


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


def differing_slots(configs: list[Config], scope: str, backend: Backend = "eager") -> list[str]:
    """Return "recipe role slot" of every rank's operands that are not the whole's part; all ranks must call it."""
    layout = layout_here(configs[0].parallel)
    found = [each for config in configs for each in _differing(config, layout, scope, backend)]
    everyone: list[Any] = [None] * layout.degrees.world
    torch.distributed.all_gather_object(everyone, found)
    return [each for rank in everyone for each in rank]


def _differing(config: Config, layout: Layout, scope: str, backend: Backend) -> list[str]:
    dtype = torch.float16 if config.precision.compute_dtype == "fp16" else torch.bfloat16
    with torch.device("meta"):
        model = Decoder(config.model)
    swap_linears(model, config.precision, config.model.num_layers, "cpu", backend)
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
        positions = positions_of(layout.coordinates.cp, 2, length)
        tensor = tensor.unflatten(0, (BATCH, length))[:, positions].flatten(0, 1)
    axis = BY_DEFINITION[role][operand]
    return (tensor if axis is None else tensor.chunk(2, axis)[layout.coordinates.tp]).contiguous()


def test_operands_are_the_parts_of_one_process(ranks):
    configs = [compose_config(words_of(recipe)) for recipe in RECIPES]
    configs.append(compose_config([*words_of("nvfp4_all_blocks"), MIX]))
    assert configs[-1].precision.recipe_hash != configs[RECIPES.index("nvfp4_all_blocks")].precision.recipe_hash
    degrees = Layout(configs[0].parallel, compose_degrees(configs[0])).degrees
    assert [str(problem) for config in configs for problem in sharding_problems(config, degrees)] == []
    assert ranks(4).call(differing_slots, configs, "logical") == []


@pytest.mark.skipif(inductor.no_compiler("cpu") is not None, reason="no C++ compiler")
def test_compiled_operands_are_the_parts_of_one_process(monkeypatch):
    """Every rank's in turn, in one process: no slot of this recipe asks the other ranks for an amax."""
    monkeypatch.setattr(Layout, "group", lambda layout, axis: axis)
    config = compose_config(words_of("mxfp4_sr"))
    layouts = [Layout(config.parallel, compose_degrees(config), rank) for rank in range(4)]
    assert [_differing(config, layout, "logical", "compiled") for layout in layouts] == [[]] * 4


@pytest.mark.full
@pytest.mark.skipif(inductor.no_compiler("cpu") is not None, reason="no C++ compiler")
def test_compiled_operands_of_ranks_are_the_parts_of_one_process(ranks):
    assert ranks(4).call(differing_slots, [compose_config(words_of("nvfp4"))], "logical", "compiled") == []


def test_shard_scope_takes_the_scale_of_the_shard(ranks):
    """What Transformer Engine does natively, and why the scope that is the default asks the other ranks."""
    config = compose_config(words_of("fp8_current_e4m3"))
    differing = ranks(4).call(differing_slots, [config], "shard")
    quantised = {slot for slot, cast in slots_of(config.precision).items() if cast.quantises}
    assert {each.split()[2] for each in differing} == quantised


LAYERS = {
    "layers.0.attention.q_proj": "column",
    "layers.0.attention.o_proj": "row",
    "layers.0.attention.gk_down_proj": "duplicate",  # of gla
}
Noted = dict[tuple[str, str], tuple[Tensor, Tensor, LinearPlan, Tensor | None]]


def noted_operands(config: Config, unsharded: str | None = None) -> list[Noted] | None:
    """Return, by rank, what the first micro-batch of a run gave each slot of `LAYERS`, and what became of it.

    By (layer, slot): the operand's tensor, the operand, the layer's casts and its keys. `unsharded`: a role whose dy is
    taken for whole, as a wrong table would have it. None on all ranks but the first.
    """
    noted: Noted = {}
    names: dict[int, str] = {}  # plans by identity: a call does not know its layer
    operand, place, table = _Call.operand, QuantisedLinear.multiply, dict(SHARD_AXES[unsharded or "column"])

    def multiply(layer: QuantisedLinear, *tensors: Any) -> Tensor:
        names[id(layer.plan)] = layer.name
        return place(layer, *tensors)

    def note(call: _Call, x: Tensor, slot: str, axis: int) -> Any:
        made = operand(call, x, slot, axis)
        name = names[id(call.plan)]
        if name in LAYERS and call.plan.casts[slot].quantises and (name, slot) not in noted:
            casts = LinearPlan(call.plan.casts, "eager")
            noted[name, slot] = x.detach().clone(), made.dequantised(), casts, call.keys
        return made

    _Call.operand, QuantisedLinear.multiply = note, multiply
    if unsharded is not None:
        SHARD_AXES[unsharded]["dy"] = None
    try:
        run_with(config, saves=False)
    finally:
        _Call.operand, QuantisedLinear.multiply = operand, place
        SHARD_AXES[unsharded or "column"].update(table)
    of_ranks: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_ranks, noted)
    return of_ranks if torch.distributed.get_rank() == 0 else None


def slots_unlike_the_whole(of_ranks: list[Noted]) -> set[tuple[str, str]]:
    """Return (role, slot) of operands that are not the parts of the whole's, of the tensors that ranks were given."""
    found = set()
    for (name, slot), (_, _, casts, keys) in of_ranks[0].items():
        role, operand = LAYERS[name], slot.rpartition(".")[2]
        given, made = (
            _together(
                [noted[name, slot][part] for noted in of_ranks if (name, slot) in noted], BY_DEFINITION[role][operand]
            )
            for part in (0, 1)
        )
        whole = _Call(casts, keys, None).operand(given, slot, CONTRACTION[slot])
        if not torch.equal(whole.dequantised(), made):
            found.add((role, slot))
    return found


def _together(parts: list[Tensor], axis: int | None) -> Tensor:
    assert axis is not None or all(torch.equal(part, parts[0]) for part in parts)
    return parts[0] if axis is None else torch.cat(parts, axis)


@pytest.fixture
def operands_of_a_run(ranks, small_run, tmp_path):
    def run(recipe: str, layout: str, world: int, *planted: str, layers: str = "attention") -> list[Noted]:
        words = [f"parallel={layout}", f"trainer.devices={world}", f"model.layers=[{layers}]", f"precision={recipe}"]
        words += [
            "precision.casts=eager",
            "model.num_heads=4",
            "model.num_kv_heads=4",
            "model.hidden_size=64",
            "model.num_layers=2",
        ]
        words += ["trainer.max_steps=1", "schedule=constant", "schedule.warmup_steps=0", "data.sequence_length=64"]
        words += ["precision.modules.first_blocks_high_precision=0", "trainer.validate_every_steps=null"]
        return ranks(world).call(noted_operands, compose_config(small_run(tmp_path / layout, *words)), *planted)

    return run


QUANTISED = {(role, slot) for role in BY_DEFINITION for slot in CONTRACTION}


@pytest.mark.parametrize("recipe", ["nvfp4", pytest.param("fp8_current", marks=pytest.mark.full)])
def test_operands_of_a_run_are_the_parts_of_the_whole_ones(recipe, operands_of_a_run):
    """All six slots of a linear of each role, of the tensors that training made of them."""
    of_ranks = operands_of_a_run(recipe, "tp", 2, layers="gla, attention")
    assert {(LAYERS[name], slot) for name, slot in of_ranks[0]} == QUANTISED
    assert slots_unlike_the_whole(of_ranks) == set()


def test_a_planted_fault_in_the_place_of_a_gradient_is_found(operands_of_a_run):
    """Scales and random bits of dy as if each rank's columns were all there are: no loss shows it."""
    of_ranks = operands_of_a_run("nvfp4", "tp", 2, "column")
    assert slots_unlike_the_whole(of_ranks) == {("column", "dgrad.dy"), ("column", "wgrad.dy")}


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_current"])
def test_the_first_operands_of_a_run_are_the_parts_of_one_rank(recipe, operands_of_a_run):
    """Embedding, norm and gathering leave x at step 1 as one rank has it. Further on, sums in another order were."""
    first = [("layers.0.attention.q_proj", slot) for slot in ("fprop.x", "fprop.w")]
    made = [operands_of_a_run(recipe, *place)[0] for place in (("single", 1), ("tp", 2), ("cp", 2))]
    (x, w), (tensor_x, tensor_w), (context_x, context_w) = ([noted[slot][1] for slot in first] for noted in made)
    assert torch.equal(tensor_x, x)
    assert torch.equal(tensor_w, w.chunk(2)[0])
    own = x.unflatten(0, (2, 64))[:, positions_of(0, 2, 64)].flatten(0, 1)  # 2 sequences in a micro-batch
    assert torch.equal(context_x, own)
    assert torch.equal(context_w, w)


def compose_degrees(config: Config) -> Any:
    from lightning_llm.plan.degrees import resolve_degrees

    return resolve_degrees(config.parallel, 4)


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        ("mxfp8", ["model.num_kv_heads=1"], "num_kv_heads = 1"),
        ("mxfp8", ["model.head_dim=48"], "96 / 2 = 48 long, no multiple of 32"),
        ("mxfp8", ["model.head_dim=48"], "or model.head_dim to a multiple of 32"),
        ("mxfp4_sr", ["data.sequence_length=192"], "rotations of 64"),
    ],
)
def test_blocks_that_a_shard_would_cut_are_refused(recipe, words, said):
    config = compose_config([*words_of(recipe), *words])
    problems = [str(problem) for problem in sharding_problems(config, compose_degrees(config))]
    assert any(said in problem for problem in problems), problems
