"""Casts of weights kept within a step: the bits of one that makes them per micro-batch. 4 CPU seconds, 60 in full.

Steps are whole ones (`TrainStep`) of a rank alone; tests/parallel/test_kept_casts_over_ranks.py has layouts.
"""

from collections import Counter
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import Config
from lightning_llm.config.schema.precision import ModuleRules, slots_of
from lightning_llm.data.corpus import Batch
from lightning_llm.dry_run.rank import count_step
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.check import check_config
from lightning_llm.plan.memory.rank_bytes import memory_bytes
from lightning_llm.plan.resolve import plan_of
from lightning_llm.precision.cast.quantize import Operand
from lightning_llm.precision.linear.module import quantized_layers
from lightning_llm.precision.linear.operands import LinearCall
from lightning_llm.precision.linear.plan import KeptCasts
from lightning_llm.precision.linear.weight_rules import kept_slots
from lightning_llm.train.parallel_model import ParallelModel
from lightning_llm.train.quantization import LossScaler, Quantization
from lightning_llm.train.spikes import SpikePolicy
from lightning_llm.train.step import TrainState, TrainStep
from tests.precision.recipes import RECIPES, load

FULL = pytest.mark.full
STEPS, MICRO_BATCHES = 3, 3
CPU = torch.device("cpu")
WORDS = [
    "model=llama_tiny", "model.num_layers=2", "model.hidden_size=128", "model.num_heads=2", "model.num_kv_heads=2",
    "model.ffn_hidden_size=128", "model.vocab_size=320", "data.tokenizer.vocab_size=300", "data=python",
    "data.sequence_length=64", "data.micro_batch_size=1", f"data.global_batch_size={MICRO_BATCHES}", "parallel=single",
    "schedule.warmup_steps=0", f"trainer.max_steps={STEPS}", "logger=none", "run.name=kept", "precision=bf16",
]  # fmt: skip
ZERO = {"dp_replicate": 1, "dp_shard": 2}
EXPECTED = {
    "fp8_current": 1, "fp8_current_e4m3": 1, "fp8_delayed": 1, "fp8_delayed_micro_batch": 0, "fp8_subchannel": 1,
    "fp8_subchannel_fp32scales": 2, "mxfp8": 2, "mxfp8_ocp": 2, "fp16_mxfp8": 2, "fp16_mxfp8_hybrid": 2, "nvfp4": 1,
    "nvfp4_all_blocks": 1, "mxfp4_rne": 1, "mxfp4_rht_rne": 0, "mxfp4_sr": 0, "mxfp4_sr_norht": 0, "mxfp4_sr_fp8": 1,
    "quartet": 1, "fp4_all_the_way": 2, "fp8_mlp": 1, "fp8_unit": 1, "fp8_rowwise": 2, "fp8_rowwise_gw_hp": 2,
    "fp8_subchannel_ue8m0": 1, "int8_rowwise": 2, "mxfp6": 2, "mxfp8_bwd_dequantized": 1, "mxfp8_bwd_high_fwd": 1,
    "mxfp8_fwd_nvfp4_bwd": 2, "mxfp8_wgrad_hp": 2, "nvfp4_1d_weight": 2, "nvfp4_4over6": 1, "nvfp4_bwd_dequantized": 1,
    "nvfp4_fwd_mxfp8_bwd": 2, "nvfp4_late_bf16_fwd": 1, "nvfp4_qat": 1, "quartet_ii": 1, "tetrajet_v2": 1,
}  # fmt: skip
"""Number of casts of a weight that each recipe can cache: one where both GEMMs read the same numbers, or one is
random."""


class Made(NamedTuple):
    """Bitwise results of some steps, and the number of casts."""

    figures: list[Any]
    tensors: list[Tensor]
    observed: Counter[tuple[str, float]]
    cast: list[Counter[tuple[int, str]]]
    """Number of casts of each weight, by step."""
    kept_bytes: list[int]
    """When the last backward pass of a step was over, of all layers."""
    graphs: int


def steps_of(config: Config, compiled: bool = False) -> Made:
    """Take `STEPS` steps of random tokens. In the second one an observer looks at all casts."""
    plan, graphs, cast = plan_of(config), [], [Counter() for _ in range(STEPS)]
    made, end, held = LinearCall._made, KeptCasts.end_step, Counter()
    figures, tensors, observed = [], [], Counter()

    def counted(call: LinearCall, x: Any, slot: str, axis: int) -> Operand:
        if slot.endswith(".w") and call.plan.casts[slot].quantizes:
            cast[len(figures)][id(call.plan.weight_casts), slot] += 1
        return made(call, x, slot, axis)

    def weighed(kept: KeptCasts) -> None:
        if kept.in_step:
            held[len(figures)] += bytes_of(kept)
        end(kept)

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compile_module = nn.Module.compile
    quantization = Quantization(config.precision, config.seed, STEPS, plan.decision)
    with patch.object(nn.Module, "compile", lambda module: compile_module(module, backend=backend)):
        layout = Layout(config.parallel.model_copy(update={"compile": compiled}), plan.degrees)
        parallel = ParallelModel.build(config, layout, CPU, quantization)
    layers = quantized_layers(parallel.model)
    state = TrainState(config.data.global_batch_size * config.data.sequence_length)
    scaler = LossScaler(config.precision.loss_scaling)
    act = [lambda loss: tensors.extend(each.grad.clone() for each in parallel.model.parameters())]
    step = TrainStep.build(config, parallel, state, scaler, SpikePolicy(config.spikes), lambda _: None, act)
    tokens = torch.randint(64, (STEPS, MICRO_BATCHES, 1, 64), generator=torch.Generator().manual_seed(1))
    parallel.model.train()
    with patch.object(LinearCall, "_made", counted), patch.object(KeptCasts, "end_step", weighed):
        for number, each in enumerate(tokens):
            for layer in layers:
                layer.observe = (lambda cast: observed.update([seen(cast)])) if number == 1 else None
            loss = step(Batch(each, each, None))
            figures.append((float(loss), state.record["grad_norm"]))
    tensors += [*parallel.model.parameters(), *quantization.state(parallel.model).values()]
    assert not any(layer.plan.weight_casts.kept for layer in layers if layer.plan.weight_casts is not None)
    return Made(figures, tensors, observed, cast, [held[number] for number in range(STEPS)], len(graphs))


def seen(cast: Any) -> tuple[str, float]:
    return cast.slot, float(cast.operand.tensor.double().sum())


def bytes_of(kept: KeptCasts) -> int:
    """Return the bytes of the storages that are kept."""
    found = {}
    for each in kept.kept.values():
        scales = None if each.blocks is None else each.blocks.scales
        for tensor in (each.tensor, each.factor, each.inside, scales):
            if tensor is not None:
                found[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(found.values())


@cache
def base() -> Config:
    return compose_config(WORDS)


def compose(recipe: str, keep: bool | None, mode: str = "none", micro_batch_size: int = 1, **layout: int) -> Config:
    """Return the run of `WORDS` under `recipe` in all blocks, and a layout's keys."""
    config, ranks = base(), 2 if layout else 1
    rules = ModuleRules()
    kept = {"modules": rules, "casts": "eager", "keep_weight_casts": keep}
    keys = {"activation_checkpoint": mode, "name": "made", **(layout | ZERO if layout else {})}
    batch = {"micro_batch_size": micro_batch_size, "global_batch_size": MICRO_BATCHES * ranks}
    return config.model_copy(
        update={
            "precision": load(recipe).model_copy(update=kept),
            "parallel": config.parallel.model_copy(update=keys),
            "data": config.data.model_copy(update=batch),
            "trainer": config.trainer.model_copy(update={"devices": ranks}),
        }
    )


CASES = [
    ("fp8_delayed", "none", False),
    pytest.param("nvfp4_all_blocks", "full", True, marks=FULL),
    ("mxfp8", "selective", False),
    pytest.param("quartet", "selective", False, marks=FULL),
    *(
        pytest.param(name, mode, compiled, marks=FULL)
        for name, (mode, compiled) in zip(
            ["fp8_current", "mxfp8", "fp8_subchannel", "fp8_subchannel_fp32scales", "mxfp4_sr", "mxfp4_rne",
             "fp16_mxfp8", "fp8_delayed", "quartet", "fp8_delayed_micro_batch", "mxfp8", "fp8_current"],
            [("none", False), ("full", False), ("selective", True), ("none", True)] * 3,
            strict=True,
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "mode", "compiled"), CASES)
def test_the_same_bits_are_trained_and_each_weight_is_cast_once(recipe, mode, compiled):
    """Losses, norms, gradients, weights, delayed scales and observed casts are equal; no cast is kept after a step."""
    config = compose(recipe, None, mode)
    ours, theirs = steps_of(config, compiled), steps_of(compose(recipe, False, mode), compiled)
    assert ours.figures == theirs.figures
    assert len(ours.tensors) == len(theirs.tensors)
    assert all(map(torch.equal, ours.tensors, theirs.tensors))
    assert ours.observed == theirs.observed
    assert ours.observed
    assert ours.graphs == theirs.graphs
    assert bool(ours.graphs) == compiled
    kept = kept_slots(slots_of(load(recipe)), rotated=mode != "selective")
    for step in (0, 2):
        times = Counter(dict.fromkeys(kept, 0))
        for (_, slot), count in ours.cast[step].items():
            if slot in kept:
                assert count == 1, slot
                times[slot] += 1
        assert set(times.values()) <= {7 * 2}
        assert min(theirs.cast[step].values()) >= MICRO_BATCHES
    assert theirs.kept_bytes == [0] * STEPS
    assert ours.kept_bytes[0] == ours.kept_bytes[2] == memory_bytes(plan_of(config))["weight_casts"]


@pytest.mark.parametrize("recipe", [name for name in RECIPES if load(name).quantizes])
def test_what_each_recipe_can_keep(recipe):
    assert len(kept_slots(slots_of(load(recipe)))) == EXPECTED[recipe]


@FULL
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_subchannel_fp32scales"])
def test_a_dry_step_holds_as_much_more_as_is_planned(recipe):
    """At its peak every weight's casts are kept; the other step then has at most those of one, just made."""
    peaks = []
    for keep in (True, False):
        plan = plan_of(compose(recipe, keep))
        layout = Layout(plan.parallel, plan.degrees)
        peaks.append(count_step(plan, layout, FakeTensorMode(allow_non_fake_inputs=True)).peak_bytes)
    planned, of_one_weight = memory_bytes(plan_of(compose(recipe, True)))["weight_casts"], 2 * 128 * 128
    assert planned - of_one_weight <= peaks[0] - peaks[1] <= planned


def test_weights_that_move_are_cast_anew_however_a_step_ended():
    """Casts are kept within a step alone: not by a validation after it, nor where a backward pass fails."""
    config = compose("mxfp8", True)
    quantization = Quantization(config.precision, 0, STEPS)
    parallel = ParallelModel.build(config, Layout(config.parallel, plan_of(config).degrees), CPU, quantization)
    model, tokens = parallel.model, torch.arange(64)[None]

    def fail_in_a_step() -> None:
        with quantization.weights_held(model):
            assert torch.equal(model(tokens), before)
            raise KeyboardInterrupt

    with torch.no_grad():
        before = model(tokens)
        with pytest.raises(KeyboardInterrupt):
            fail_in_a_step()
        for layer in quantized_layers(model):
            assert not layer.plan.weight_casts.kept
            layer.weight.mul_(1.5)
        after = model(tokens)
        with quantization.weights_held(model):
            assert torch.equal(model(tokens), after)
    assert not torch.equal(after, before)


@pytest.mark.parametrize(
    ("recipe", "keys", "kept"),
    [
        ("fp8_subchannel", {"keep": None}, True),
        ("fp8_subchannel", {"keep": False}, False),
        ("fp8_subchannel", {"keep": None, "micro_batch_size": 3}, False),
        ("fp8_subchannel", {"keep": True, "micro_batch_size": 3}, True),
        ("fp8_subchannel", {"keep": None, "micro_batch_size": 3, "mode": "full"}, True),
        ("mxfp4_sr", {"keep": None}, False),
        ("quartet", {"keep": None, "mode": "selective"}, False),
        ("fp8_subchannel", {"keep": None, "zero_stage": 2}, False),
        ("fp8_subchannel", {"keep": True, "zero_stage": 2}, True),
        ("fp8_subchannel", {"keep": None, "zero_stage": 3}, False),
    ],
)
def test_they_are_kept_where_a_step_reads_them_several_times(recipe, keys, kept):
    plan, other = plan_of(compose(recipe, **keys)), plan_of(compose(recipe, **keys | {"keep": False}))
    assert (memory_bytes(plan)["weight_casts"] > 0) == kept
    assert memory_bytes(other)["weight_casts"] == 0
    assert plan.identity == other.identity
    assert plan.config.precision.recipe_hash == other.config.precision.recipe_hash


@pytest.mark.parametrize(
    ("recipe", "keys", "why"),
    [
        ("bf16", {}, "the recipe casts no weights"),
        ("mxfp4_sr", {}, "dgrad.w is rounded stochastically"),
        ("quartet", {"mode": "selective"}, "fprop.w is rotated, by a product that selective checkpointing keeps"),
        ("fp8_delayed_micro_batch", {}, "moves with every micro-batch"),
        ("mxfp8", {"zero_stage": 3}, "parallel=made frees a block's weights"),
        ("fp8_current", {"zero_stage": 2, "gather": "quantised"}, "parameter_gather=quantised gathers casts already"),
    ],
)
def test_casts_that_cannot_be_cached_are_rejected_with_the_reason(recipe, keys, why):
    gather = keys.pop("gather", "high")
    config = compose(recipe, True, **keys)
    precision = config.precision.model_copy(update={"parameter_gather": gather})
    with pytest.raises(ConfigError, match=r"precision\.keep_weight_casts: is true, and") as error:
        check_config(config.model_copy(update={"precision": precision}))
    assert why in str(error.value)
