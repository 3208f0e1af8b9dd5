"""Operands of cut linears are bitwise the parts of a single process's operands, under every recipe. 15 seconds.

First by themselves: ranks are tp = 2 x cp = 2, and each quantises its part of x, w and dy for every slot. Then within a
run: what ranks were given is put together and quantised as a whole.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.precision import slots_of
from lightning_llm.parallel.cp import positions_of
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.divisibility import CONTRACTION, SHARD_AXES, sharding_problems
from lightning_llm.precision.cast import inductor
from lightning_llm.precision.cast.inductor import Backend
from lightning_llm.precision.linear.module import QuantizedLinear
from lightning_llm.precision.linear.operands import Given, LinearCall
from lightning_llm.precision.linear.plan import LinearPlan
from tests.parallel.cut_operands import BY_DEFINITION, degrees_of, differing, words_of
from tests.parallel.traced_run import layout_here, run_with
from tests.precision.recipes import RECIPES as ALL_RECIPES
from tests.precision.recipes import load

WHOLE_AXES = ("fp8_rowwise", "fp8_rowwise_gw_hp", "int8_rowwise", "nvfp4_fwd_mxfp8_bwd", "quartet_ii")
"""Recipes whose scales or rotations the parts of this model would cut, which is refused."""
RECIPES = [
    name
    for name in ALL_RECIPES
    if load(name).quantizes and name not in WHOLE_AXES and load(name).modules.include == ("*",)
]
MIX = 'precision.modules.casts=[{names: ["*.o_proj"], recipe: mxfp4_sr}]'


def differing_slots(configs: list[Config], scope: str, backend: Backend = "eager") -> list[str]:
    """Return "recipe role slot" of every rank's operands that are not the whole's part; all ranks must call it."""
    layout = layout_here(configs[0].parallel)
    found = [each for config in configs for each in differing(config, layout, scope, backend)]
    everyone: list[Any] = [None] * layout.degrees.world
    torch.distributed.all_gather_object(everyone, found)
    return [each for rank in everyone for each in rank]


def test_operands_are_the_parts_of_one_process(ranks):
    configs = [compose_config(words_of(recipe)) for recipe in RECIPES]
    configs.append(compose_config([*words_of("nvfp4_all_blocks"), MIX]))
    assert configs[-1].precision.recipe_hash != configs[RECIPES.index("nvfp4_all_blocks")].precision.recipe_hash
    degrees = Layout(configs[0].parallel, degrees_of(configs[0])).degrees
    assert [str(problem) for config in configs for problem in sharding_problems(config, degrees)] == []
    whole = [compose_config(words_of(recipe)) for recipe in WHOLE_AXES]
    assert all(any(True for _ in sharding_problems(config, degrees)) for config in whole)
    assert ranks(4).call(differing_slots, configs, "logical") == []


@pytest.mark.full
@pytest.mark.skipif(inductor.no_compiler("cpu") is not None, reason="no C++ compiler")
def test_compiled_operands_of_ranks_are_the_parts_of_one_process(ranks):
    assert ranks(4).call(differing_slots, [compose_config(words_of("nvfp4"))], "logical", "compiled") == []


def test_shard_scope_takes_the_scale_of_the_shard(ranks):
    """As Transformer Engine does natively; the default scope reduces over the other ranks instead."""
    config = compose_config(words_of("fp8_current_e4m3"))
    found = ranks(4).call(differing_slots, [config], "shard")
    quantized = {slot for slot, cast in slots_of(config.precision).items() if cast.quantizes}
    assert {each.split()[2] for each in found} == quantized


LAYERS = {
    "layers.0.attention.q_proj": "column",
    "layers.0.attention.o_proj": "row",
    "layers.0.attention.gk_down_proj": "duplicate",  # of gla
}
Noted = dict[tuple[str, str], tuple[Tensor, Tensor, LinearPlan, Tensor | None]]


def noted_operands(config: Config, unsharded: str | None = None) -> list[Noted] | None:
    """Return, by rank, input and result of the cast of each slot of `LAYERS` in the first micro-batch of a run.

    By (layer, slot): the operand's tensor, the operand, the layer's casts and its keys. `unsharded`: a role with a dy
    that is treated as whole, as with a wrong table. None on all ranks but the first.
    """
    noted: Noted = {}
    names: dict[int, str] = {}  # plans by identity: a call does not know its layer
    operand, place, table = LinearCall.operand, QuantizedLinear.multiply, dict(SHARD_AXES[unsharded or "column"])

    def multiply(layer: QuantizedLinear, *tensors: Any) -> Tensor:
        names[id(layer.plan)] = layer.name
        return place(layer, *tensors)

    def note(call: LinearCall, source: Given, slot: str, axis: int) -> Any:
        made = operand(call, source, slot, axis)
        name = names[id(call.plan)]
        if name in LAYERS and call.plan.casts[slot].quantizes and (name, slot) not in noted:
            casts = LinearPlan(call.plan.casts, "eager")
            x = source() if callable(source) else source
            noted[name, slot] = x.detach().clone(), made.dequantized(), casts, call.keys
        return made

    LinearCall.operand, QuantizedLinear.multiply = note, multiply
    if unsharded is not None:
        SHARD_AXES[unsharded]["dy"] = None
    try:
        run_with(config, saves=False)
    finally:
        LinearCall.operand, QuantizedLinear.multiply = operand, place
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
        whole = LinearCall(casts, keys, None).operand(given, slot, CONTRACTION[slot])
        if not torch.equal(whole.dequantized(), made):
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


QUANTIZED = {(role, slot) for role in BY_DEFINITION for slot in CONTRACTION}


@pytest.mark.parametrize(
    ("recipe", "once"), [("nvfp4", set()), pytest.param("fp8_current", {"wgrad.dy"}, marks=pytest.mark.full)]
)
def test_operands_of_a_run_are_the_parts_of_the_whole_ones(recipe, once, operands_of_a_run):
    """All six slots of a linear of each role, of the tensors that training made; `once`: dgrad's serve wgrad."""
    of_ranks = operands_of_a_run(recipe, "tp", 2, layers="gla, attention")
    made = {(role, slot) for role, slot in QUANTIZED if slot not in once}
    assert {(LAYERS[name], slot) for name, slot in of_ranks[0]} == made
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


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        ("mxfp8", ["model.num_kv_heads=1"], "num_kv_heads = 1"),
        ("mxfp8", ["model.head_dim=48"], "96 / 2 = 48, not a multiple of 32"),
        ("mxfp8", ["model.head_dim=48"], "or model.head_dim to a multiple of 32"),
        ("mxfp4_sr", ["data.sequence_length=192"], "rotations of 64"),
    ],
)
def test_shards_that_would_cut_blocks_are_rejected(recipe, words, said):
    config = compose_config([*words_of(recipe), *words])
    problems = [str(problem) for problem in sharding_problems(config, degrees_of(config))]
    assert any(said in problem for problem in problems), problems
