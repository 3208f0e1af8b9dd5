"""Rounding of updated bf16 weights: against float64, torch's AdamW, and exhaustive probabilities."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema.optim import OPTIMIZERS
from lightning_llm.optim.matrices import on_one_rank
from lightning_llm.optim.optimizer import initialise_state
from lightning_llm.plan.check import check_config
from lightning_llm.plan.memory.rank_bytes import memory_bytes
from lightning_llm.plan.resolve import plan_of
from lightning_llm.train import weight_rounding
from lightning_llm.train.weight_rounding import WeightRounding, rounded_stochastically

SHAPES = {
    "embedding.weight": (12, 8),
    "layers.0.attention.q_proj.weight": (8, 8),
    "layers.0.attention_norm.weight": (8,),
    "head.weight": (12, 8),
}


def test_stochastic_rounding_is_exact_in_the_mean_and_takes_one_of_both_neighbors():
    """Every one of the 2^16 values of the bits that count, so the share of numbers rounded up is exact."""
    bits = (torch.arange(2**16) << 16).to(torch.int32)
    for number in (1.0 + 2**-9, 1.0 + 2**-7 - 2**-20, -3.14159, 1e-39, -7.5e37):
        exact = torch.full((2**16,), number)
        rounded = rounded_stochastically(exact, bits).double()
        low, high = sorted(rounded.unique().tolist())
        assert low < exact[0].item() < high
        assert (high - low) / 2 ** math.floor(math.log2(abs(number))) == (2**-7 if abs(number) > 1e-38 else 1 / 8)
        assert rounded.mean().item() == pytest.approx(exact[0].double().item(), rel=1e-12)


def test_numbers_of_bf16_and_those_that_are_not_finite_stay():
    bits = torch.randint(-(2**31), 2**31, (6,), dtype=torch.int64).to(torch.int32)
    exact = torch.tensor([0.0, -0.0, 1.5, -(2.0**-133), float("inf"), float("nan")])
    rounded = rounded_stochastically(exact, bits)
    torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=0, equal_nan=True)
    assert torch.signbit(rounded[:5]).tolist() == torch.signbit(exact[:5]).tolist()


def optimizer_over(kind: str, rounding: str | None, dtype: torch.dtype, steps: list[int]) -> tuple[dict, object]:
    generator = torch.Generator().manual_seed(0)
    named = {
        name: nn.Parameter(torch.randn(*shape, generator=generator).bfloat16().to(dtype))
        for name, shape in SHAPES.items()
    }
    more = {"block_size": 4} if kind == "adamw8bit" else {}
    optimizer = OPTIMIZERS[kind](name=kind, learning_rate=3e-4, **more).build(named.items(), on_one_rank)
    if rounding is not None:
        optimizer = optimizer.with_rounding(WeightRounding(rounding, named.items(), 5, lambda: len(steps)))
    initialise_state(optimizer)
    return named, optimizer


def train(kind: str, rounding: str | None, dtype: torch.dtype, count: int = 40) -> dict[str, torch.Tensor]:
    steps: list[int] = []
    named, optimizer = optimizer_over(kind, rounding, dtype, steps)
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for parameter in named.values():
            drawn = torch.randn(parameter.shape, generator=generator).bfloat16() + 0.5
            parameter.grad = drawn.to(parameter.dtype)
        optimizer.step()
        steps.append(1)
    return {name: parameter.detach().double() for name, parameter in named.items()}


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "muon"])
def test_small_changes_are_kept_that_rounding_to_nearest_loses(kind):
    """40 updates of about 3e-4 on weights above 0.5, where numbers of bf16 are 4e-3 apart: to nearest, none moves."""
    exact, start = train(kind, None, torch.float32), train(kind, None, torch.float32, count=0)
    nearest, kahan = train(kind, None, torch.bfloat16), train(kind, "kahan", torch.bfloat16)
    stochastic = train(kind, "stochastic", torch.bfloat16)
    for name in SHAPES:
        moved = (exact[name] - start[name]).mean()
        large = start[name].abs() > 0.5
        assert torch.equal(nearest[name][large], start[name][large])
        assert (kahan[name] - exact[name]).abs().max() < 2**-8 * exact[name].abs().max()
        assert ((stochastic[name] - start[name]).mean() / moved).item() == pytest.approx(1, abs=0.6)


def test_an_update_in_fp32_arithmetic_is_torchs(monkeypatch):
    """`kahan` of fp32 weights is AdamW without any rounding of weights, so torch's own is the reference."""
    monkeypatch.setattr(weight_rounding, "ELEMENTS_AT_ONCE", 16)  # pieces of two rows
    ours, theirs = train("adamw", "kahan", torch.float32), train("adamw", None, torch.float32)
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=2e-6, atol=2e-7)


def test_kahan_keeps_what_rounding_cuts_off():
    named, optimizer = optimizer_over("adamw", "kahan", torch.bfloat16, [])
    weight = named["head.weight"]
    exact = copy.deepcopy(weight.detach()).double()
    for _ in range(5):
        rounding = optimizer.rounding
        rounding.update(weight, optimizer.state[weight], lambda part, rows: part + 1e-4)
        exact += 1e-4
    kept = weight.detach().double() + optimizer.state[weight]["compensation"].double()
    torch.testing.assert_close(kept, exact, rtol=2**-15, atol=2**-16)


def test_random_bits_depend_on_seed_update_name_and_place():
    weight, other = (nn.Parameter(torch.full((64, 8), 1.0, dtype=torch.bfloat16)) for _ in range(2))
    named = [("a", weight), ("b", other)]

    def drawn(seed: int, updates: int, parameter: nn.Parameter) -> torch.Tensor:
        parameter.data.fill_(1.0)
        rounding = WeightRounding("stochastic", named, seed, lambda: updates)
        rounding.update(parameter, {}, lambda part, rows: part + 2**-8)
        return parameter.detach().clone()

    found = [drawn(1, 0, weight), drawn(2, 0, weight), drawn(1, 1, weight), drawn(1, 0, other)]
    assert torch.equal(found[0], drawn(1, 0, weight))
    assert all(not torch.equal(one, two) for at, one in enumerate(found) for two in found[:at])
    assert [0.4 < (each > 1).float().mean() < 0.6 for each in found] == [True] * 4


def test_the_plan_counts_what_kahan_keeps():
    def state(precision: str) -> int:
        return memory_bytes(plan_of(compose_config(["recipe=quickstart", f"precision={precision}"])))["optimizer"]

    parameters = memory_bytes(plan_of(compose_config(["recipe=quickstart", "precision=bf16_true"])))["parameters"]
    assert state("bf16_sr") == state("bf16_true") == 2 * parameters
    assert state("bf16_kahan") == 3 * parameters


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["precision=bf16", "precision.update.rounding=stochastic"], "update.rounding=stochastic: needs bf16 master"),
        (["precision=bf16_sr", "precision.update.rounding=nearest"], "update.rounding"),
        (["precision=bf16_sr", "+precision.update.master_dtype=fp32"], "update.master_dtype=fp32: master_dtype=bf16"),
    ],
)
def test_contradictions_are_refused(words, problem):
    with pytest.raises(ConfigError, match=problem):
        check_config(compose_config(["recipe=quickstart", *words]))


def test_the_master_dtype_may_stand_beside_the_rounding():
    recipe = compose_config(["recipe=quickstart", "precision=bf16_sr"]).precision
    content = recipe.model_dump(exclude={"master_dtype"})
    beside = type(recipe)(**{**content, "update": {"rounding": "stochastic", "master_dtype": "bf16"}})
    assert beside == recipe
    assert beside.recipe_hash == recipe.recipe_hash


def test_optimizers_that_round_to_nearest_are_refused(monkeypatch):
    monkeypatch.setattr(OPTIMIZERS["muon"], "rounds_weights", False)
    with pytest.raises(ConfigError, match=r"precision\.update\.rounding=stochastic: optim=muon rounds weights"):
        check_config(compose_config(["recipe=quickstart", "precision=bf16_sr", "optim=muon"]))


@pytest.mark.parametrize("rounding", [None, "kahan"])
def test_the_hooks_of_a_step_run_once(rounding):
    """Also where torch's own class was used before: it wraps `step` of each class, and a nested call counts twice."""
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    _, optimizer = optimizer_over("adamw", rounding, torch.bfloat16, [])
    seen: list[object] = []
    hook = register_optimizer_step_post_hook(lambda stepped, *_: seen.append(stepped))
    try:
        optimizer.step()
    finally:
        hook.remove()
    assert seen == [optimizer]
