"""The registered optimizers against references, decay groups, the schedules at their landmarks, and clipping."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from lightning_llm.base.errors import ConfigError
from lightning_llm.config.compose import compose_config
from lightning_llm.config.schema import OptimConfig, ParallelConfig
from lightning_llm.config.schema.optim import OPTIMIZERS, SCHEDULES, ParameterShard
from lightning_llm.optim.adamw8bit import dequantized, dynamic_map, quantized
from lightning_llm.optim.kinds import learning_rate_factor
from lightning_llm.optim.matrices import on_one_rank
from lightning_llm.optim.muon import orthogonalised
from lightning_llm.optim.optimizer import AdamW, LearningRate, groups_of, initialise_state, role_of
from lightning_llm.parallel.grad_norm import clip_gradients, gradient_norm
from lightning_llm.parallel.layout import Layout
from lightning_llm.plan.check import check_config
from lightning_llm.plan.degrees import Degrees
from lightning_llm.plan.memory.units import _shard

ALONE = Layout(ParallelConfig(name="single"), Degrees())
PARAMETERS = [
    ("embedding.weight", nn.Parameter(torch.ones(4, 2))),
    ("layers.0.attention.q_proj.weight", nn.Parameter(torch.ones(2, 2))),
    ("layers.0.attention.q_proj.bias", nn.Parameter(torch.ones(2))),
    ("layers.0.attention_norm.weight", nn.Parameter(torch.ones(2))),
]


def config(**values: object) -> OptimConfig:
    return OPTIMIZERS["adamw"](learning_rate=0.1, **values)


@pytest.mark.parametrize(
    ("key", "names"),
    [
        (None, {"layers.0.attention.q_proj.weight"}),
        ("decay_norms", {"layers.0.attention.q_proj.weight", "layers.0.attention_norm.weight"}),
        ("decay_biases", {"layers.0.attention.q_proj.weight", "layers.0.attention.q_proj.bias"}),
        ("decay_embeddings", {"layers.0.attention.q_proj.weight", "embedding.weight"}),
    ],
)
def test_decayed_parameters_follow_the_settings(key, names):
    settings = config(**({key: True} if key else {}))
    groups = groups_of(PARAMETERS, settings)
    name_of = {id(parameter): name for name, parameter in PARAMETERS}
    decayed, undecayed = ({name_of[id(each)] for each in group["params"]} for group in groups)
    assert [group["weight_decay"] for group in groups] == [settings.weight_decay, 0.0]
    assert decayed == names
    assert undecayed == set(name_of.values()) - names


def test_the_update_is_adamw_in_float64():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 5, generator=generator)
    gradients = [torch.randn(3, 5, generator=generator) for _ in range(4)]
    parameter = nn.Parameter(start.clone())
    settings = config(beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
    optimizer = settings.build([("layers.0.x.weight", parameter)], on_one_rank)
    expected, first, second = start.double(), torch.zeros(3, 5).double(), torch.zeros(3, 5).double()
    for t, gradient in enumerate(gradients, 1):
        parameter.grad = gradient.clone()
        optimizer.step()
        first = 0.8 * first + 0.2 * gradient
        second = 0.9 * second + 0.1 * gradient.double() ** 2
        expected = expected * (1 - 0.1 * 0.3)
        expected -= 0.1 * (first / (1 - 0.8**t)) / ((second / (1 - 0.9**t)).sqrt() + 1e-6)
    torch.testing.assert_close(parameter.detach().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("elements", "shard"), [(144, 36), (144, 18), (128, 4), (72, 18), (70, 5)])
def test_a_shard_of_any_size_gets_the_bits_of_the_whole(elements, shard):
    """Torch's fused CPU kernel alone rounds the elements behind the last whole vector register otherwise."""
    random = torch.Generator().manual_seed(0)
    gradients = [torch.randn(elements, generator=random) for _ in range(6)]

    def updated(part: slice) -> torch.Tensor:
        parameter = nn.Parameter(torch.zeros(elements)[part].clone())
        optimizer = AdamW([parameter], lr=1e-3, fused=True)
        for gradient in gradients:
            parameter.grad = gradient[part].clone()
            optimizer.step()
        return parameter.data

    parts = [updated(slice(start, start + shard)) for start in range(0, elements, shard)]
    assert torch.equal(torch.cat(parts), updated(slice(None)))


def test_schedules_at_their_landmarks():
    def factors(name: str) -> list[float]:
        schedule = SCHEDULES[name](warmup_steps=4, decay_fraction=0.25, final_factor=0.1)
        return [learning_rate_factor(schedule, updates, 20) for updates in range(25)]

    for name in ("constant", "cosine", "wsd"):
        assert factors(name)[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors("constant")[4:] == [1.0] * 21
    assert factors("wsd")[4:15] == [1.0] * 11
    assert factors("wsd")[15:20] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1])
    assert factors("cosine")[11] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 2)) / 2)
    for name in ("cosine", "wsd"):
        assert factors(name)[19:] == pytest.approx([0.1] * 6)


def test_a_warm_up_that_is_longer_than_the_stable_phase_is_followed_by_the_decay():
    """The decay begins where the warm-up ends, so that the rate never jumps down from its peak."""
    schedule = SCHEDULES["wsd"](warmup_steps=8, decay_fraction=0.75, final_factor=0.0)
    factors = [learning_rate_factor(schedule, updates, 12) for updates in range(14)]
    assert factors == pytest.approx([*(n / 8 for n in range(1, 9)), 0.75, 0.5, 0.25, 0.0, 0.0, 0.0])


def test_the_last_update_has_the_floor_however_short_the_decay():
    wsd = SCHEDULES["wsd"](warmup_steps=2, decay_fraction=0.1, final_factor=0.1)  # one update of ten
    assert [learning_rate_factor(wsd, updates, 10) for updates in (7, 8, 9, 10)] == pytest.approx([1, 1, 0.1, 0.1])
    cosine = SCHEDULES["cosine"](warmup_steps=9, final_factor=0.1)
    assert [learning_rate_factor(cosine, updates, 10) for updates in (8, 9, 10)] == pytest.approx([1, 0.1, 0.1])
    for total in (9, 8):  # no update is left to decay in
        assert learning_rate_factor(cosine, 9, total) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_a_schedule_of_given_steps_is_that_of_a_run_so_long(name):
    keys = {"warmup_steps": 2, "decay_fraction": 0.4, "final_factor": 0.1}
    given, of_run = SCHEDULES[name](**keys, total_steps=10), SCHEDULES[name](**keys)
    for updates in range(14):
        factor = learning_rate_factor(of_run, updates, 10)
        assert learning_rate_factor(given, updates, 1000) == learning_rate_factor(given, updates, 5) == factor


def test_re_warming_rises_to_a_share_of_the_rate_and_decays_to_an_absolute_floor():
    keys = {"warmup_steps": 4, "decay_fraction": 0.25, "peak_factor": 0.5}
    for name in ("cosine", "wsd"):
        plain = SCHEDULES[name](**keys, final_factor=0.1)
        floored = SCHEDULES[name](**keys, final_learning_rate=1e-5)
        assert floored.final_factor is None
        for peak in (2e-4, 8e-4):
            optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in (peak, 1.0)])
            rate = LearningRate(optimizer, floored.relative_to(peak), 20)
            rates = [rate.set(updates) for updates in range(25)]
            assert rates[:4] == pytest.approx([peak * 0.5 * each for each in (0.25, 0.5, 0.75, 1.0)])
            assert rates[19:] == pytest.approx([1e-5] * 6)
            assert optimizer.param_groups[1]["lr"] == pytest.approx(1e-5 / peak)  # falls by the same factor
            if peak == 2e-4:  # the floor is a tenth of the re-warmed peak
                assert rates == pytest.approx([peak * learning_rate_factor(plain, each, 20) for each in range(25)])
    with pytest.raises(ValueError, match="relative_to"):
        learning_rate_factor(SCHEDULES["cosine"](final_learning_rate=1e-5), 5, 20)


@given(
    name=st.sampled_from(["constant", "cosine", "wsd"]),
    warmup=st.integers(0, 30),
    total=st.integers(31, 200),
    final=st.floats(0, 1),
    fraction=st.floats(0, 1),
)
def test_schedules_rise_then_never_rise_again(name, warmup, total, final, fraction):
    schedule = SCHEDULES[name](warmup_steps=warmup, total_steps=total, decay_fraction=fraction, final_factor=final)
    factors = [learning_rate_factor(schedule, updates, 10**6) for updates in range(total + 5)]
    assert all(0 <= factor <= 1 for factor in factors)
    assert all(b >= a for a, b in pairwise(factors[:warmup]))
    assert all(b <= a + 1e-12 for a, b in pairwise(factors[warmup:]))


def test_clipping_against_torch_in_float64():
    generator = torch.Generator().manual_seed(1)
    shapes = [(3, 4), (7,), (2, 2, 2)]
    gradients = [torch.randn(shape, generator=generator) * 100 for shape in shapes]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for max_norm in (None, 1e9, 1.0):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        norm = gradient_norm(parameters, ALONE).item()
        clip_gradients(parameters, norm, max_norm or math.inf)
        expected = torch.cat([gradient.flatten().double() for gradient in gradients]).norm().item()
        assert norm == np.float32(expected)
        after = torch.cat([parameter.grad.flatten().double() for parameter in parameters]).norm().item()
        assert after == pytest.approx(min(expected, max_norm or expected), rel=1e-6)


def test_clipping_leaves_what_is_within_untouched_bit_for_bit():
    parameter = nn.Parameter(torch.zeros(5))
    parameter.grad = torch.tensor([0.1, -0.2, 0.3, 0.0, 1e-30])
    before = parameter.grad.clone()
    clip_gradients([parameter], gradient_norm([parameter], ALONE).item(), 1.0)
    assert torch.equal(parameter.grad, before)


SHAPES = {
    "embedding.weight": (32, 24),
    "layers.0.attention.q_proj.weight": (24, 24),
    "layers.0.feed_forward.up_proj.weight": (40, 24),
    "layers.0.feed_forward.down_proj.weight": (24, 40),
    "layers.0.feed_forward.up_proj.bias": (40,),
    "layers.0.attention_norm.weight": (24,),
    "head.weight": (32, 24),
}


def trained(make, dtype=torch.float32, steps=4, look=False):
    """Return the parameters of SHAPES after `steps` of the optimizers that `make` returns for them."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    for name, shape in SHAPES.items():
        values = torch.randn(shape, generator=generator).mul(0.02).to(dtype)
        model.register_parameter(name.replace(".", "/"), nn.Parameter(values))
    named = [(name.replace("/", "."), parameter) for name, parameter in model.named_parameters()]
    optimizers = make(named)
    if look:
        for optimizer in optimizers:
            before = [dict(group) for group in optimizer.param_groups]
            initialise_state(optimizer)
            assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in before]
            get_optimizer_state_dict(model, optimizer)
    for _ in range(steps):
        for _, parameter in named:
            parameter.grad = torch.randn(parameter.shape, generator=generator).mul(1e-2).to(dtype)
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach() for name, parameter in named}


@pytest.mark.parametrize("name", [*OPTIMIZERS, "torch SGD", "torch Adagrad", "torch Muon"])
def test_reading_the_state_before_the_first_step_changes_nothing(name):
    def make(named):
        if name in OPTIMIZERS:
            return [OPTIMIZERS[name](learning_rate=0.1).build(named, on_one_rank)]
        each = [parameter for _, parameter in named if parameter.ndim == 2 or name != "torch Muon"]
        kind = getattr(torch.optim, name.split()[1])
        return [kind(each, lr=0.1, **({"momentum": 0.9} if name == "torch SGD" else {}))]

    one, other = trained(make, look=True), trained(make)
    assert all(torch.equal(one[name], other[name]) for name in SHAPES)


KEPT = SHAPES | {
    "layers.0.experts.weight": (4, 6, 10),
    "layers.0.gate.weight": (24, 1),
    "position_embedding.weight": (8, 24),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_planned_as_it_is_kept_of_parameters_of_any_number_of_dimensions(name):
    settings = OPTIMIZERS[name](learning_rate=0.1)
    named = [(key, nn.Parameter(torch.zeros(shape))) for key, shape in KEPT.items()]
    optimizer = settings.build(named, on_one_rank)
    initialise_state(optimizer)
    for key, parameter in named:
        shard = ParameterShard(KEPT[key][0], math.prod(KEPT[key][1:]), role_of(key, parameter.ndim))
        if key.startswith("layers."):
            assert _shard(KEPT[key], "replicate", 1) == shard, key
        kept = sum(value.nbytes for part, value in optimizer.state[parameter].items() if part != "step")
        assert settings.state_bytes(shard, 4) == kept, key


MUON = [
    ({}, {"adjust_lr_fn": "match_rms_adamw"}, torch.float32),
    ({"adjust_learning_rate": "original", "nesterov": False}, {"nesterov": False}, torch.float32),
    ({"newton_schulz_steps": 3, "momentum": 0.4}, {"ns_steps": 3, "momentum": 0.4}, torch.bfloat16),
]


@pytest.mark.parametrize(("keys", "arguments", "dtype"), MUON)
def test_muon_is_torchs_to_the_bit_and_adamw_updates_the_rest(keys, arguments, dtype):
    def torchs(named):
        hidden = [each for name, each in named if name.startswith("layers") and each.ndim == 2]
        decayed = [each for name, each in named if name.startswith("head")]
        others = [each for _, each in named if not any(each is one for one in (*hidden, *decayed))]
        muon = {"adjust_lr_fn": "match_rms_adamw"} if "adjust_learning_rate" not in keys else {}
        groups = [{"params": decayed, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
        return [
            torch.optim.Muon(hidden, lr=0.01, weight_decay=0.3, **muon | arguments),
            torch.optim.AdamW(groups, lr=0.002, betas=(0.9, 0.95), eps=1e-8, fused=True),
        ]

    settings = OPTIMIZERS["muon"](learning_rate=0.01, adamw_learning_rate=0.002, weight_decay=0.3, **keys)
    ours, theirs = trained(lambda named: [settings.build(named, on_one_rank)], dtype), trained(torchs, dtype)
    assert [name for name in SHAPES if not torch.equal(ours[name], theirs[name])] == []


def test_muons_updates_are_nearly_orthogonal():
    singular = torch.linalg.svdvals(orthogonalised(torch.randn(40, 24).bfloat16(), 5).float())
    assert 0.6 < singular.min() < singular.max() < 1.3


def codes_in_numpy(values, block, signed):
    """Return a stored moment as float64: each number of a block by the nearest code."""
    table = np.array(dynamic_map(signed))
    kept = np.zeros_like(values)
    for row, column in product(range(values.shape[0]), range(0, values.shape[1], block)):
        part = values[row, column : column + block]
        scale = abs(part).max()
        nearest = abs(part[:, None] / (scale or 1.0) - table[None]).argmin(axis=1)
        kept[row, column : column + block] = table[nearest] * scale
    return kept


def test_8_bit_adamw_equals_float64_adamw_with_moments_rounded_after_each_step():
    settings = OPTIMIZERS["adamw8bit"](learning_rate=0.01, weight_decay=0.3, block_size=16)
    generator = torch.Generator().manual_seed(3)
    parameter = nn.Parameter(torch.randn(24, 40, generator=generator) * 0.02)
    optimizer = settings.build([("layers.0.feed_forward.down_proj.weight", parameter)], on_one_rank)
    weight, first, second = parameter.detach().double().numpy().copy(), np.zeros((24, 40)), np.zeros((24, 40))
    for count in range(1, 5):
        gradient = torch.randn(24, 40, generator=generator) * torch.logspace(-4, 0, 40)
        parameter.grad = gradient.clone()
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient.double().numpy()
        second = 0.95 * second + 0.05 * gradient.double().numpy() ** 2
        weight *= 1 - 0.01 * 0.3
        weight -= 0.01 * first / (1 - 0.9**count) / (np.sqrt(second / (1 - 0.95**count)) + 1e-8)
        first, second = codes_in_numpy(first, 16, True), codes_in_numpy(second, 16, False)
        np.testing.assert_allclose(parameter.detach().numpy(), weight, rtol=1e-5, atol=2e-6)
    state = optimizer.state[parameter]
    assert {key: (value.dtype, tuple(value.shape)) for key, value in state.items() if key != "step"} == {
        "exp_avg_codes": (torch.uint8, (24, 40)),
        "exp_avg_scales": (torch.float32, (24, 3)),
        "exp_avg_sq_codes": (torch.uint8, (24, 40)),
        "exp_avg_sq_scales": (torch.float32, (24, 3)),
    }


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_code(signed):
    """Its 256 values: the paper's example, ends, and a precision that is relative over six decades."""
    table = dynamic_map(signed)
    assert len(set(table)) == 256
    assert table == sorted(table)
    assert (max(table), min(table)) == (1.0, pytest.approx(-0.9929688) if signed else 0.0)
    positive = [value for value in table if value > 0]
    assert positive[0] == pytest.approx(5.5e-7 if signed else 3.25e-7)
    large = [value for value in positive if value > 0.1]
    assert len(large) == (65 if signed else 129)
    assert max(b - a for a, b in pairwise(large)) <= 0.9 / (64 if signed else 128) + 1e-12


@given(rows=st.integers(0, 5), columns=st.integers(1, 40), block=st.integers(1, 17), data=st.data())
def test_8_bit_blocks_are_the_same_in_any_shard_of_rows(rows, columns, block, data):
    signed, cut = data.draw(st.booleans()), data.draw(st.integers(0, 5))
    numbers = st.floats(-1e6, 1e6, width=32) if signed else st.floats(0, 1e6, width=32)
    values = data.draw(st.lists(numbers, min_size=rows * columns, max_size=rows * columns))
    whole = torch.tensor(values, dtype=torch.float32).view(rows, columns)
    codes, scales = quantized(whole, block, signed)
    shards = [quantized(shard, block, signed) for shard in (whole[:cut], whole[cut:])]
    assert torch.equal(torch.cat([shard[0] for shard in shards]), codes)
    assert torch.equal(torch.cat([shard[1] for shard in shards]), scales)
    read = dequantized(codes, scales, block, signed)
    assert (read - whole).abs().le(scales.repeat_interleave(block, 1)[:, :columns] * 0.0071).all()
    assert read[whole == 0].eq(0).all()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wrong_keys_of_an_optimizer_get_their_suggestions(name):
    keys = OPTIMIZERS[name].model_fields.keys() - {"name"}
    with pytest.raises(ConfigError) as error:
        compose_config([f"optim={name}", *(f"+optim.{key}x=1" for key in keys)])
    found = {problem.key: problem.text for problem in error.value.problems}
    assert found == {f"optim.{key}x": f"unknown key. Did you mean '{key}'?" for key in keys}


def test_an_optimizer_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"optim\.name: there is no optimizer 'muno'\. Did you mean 'muon'"):
        compose_config(["optim.name=muno"])
    with pytest.raises(ConfigError, match=r"optim\.momentum: unknown key"):
        compose_config(["+optim.momentum=0.5"])  # of another kind


def test_rows_that_tensor_parallel_ranks_would_cut_within_a_block_are_refused():
    words = ["optim=adamw8bit", "parallel=tp", "parallel.tp=2", "trainer.devices=2", "model=llama_8b"]
    check_config(compose_config(words))
    with pytest.raises(
        ConfigError, match=r"not a multiple of optim.block_size=4096: .*Set optim.block_size=2048, or tp=1"
    ):
        check_config(compose_config([*words, "optim.block_size=4096"]))


@pytest.mark.parametrize(
    ("name", "dimensions", "role"),
    [
        ("embedding.weight", 2, "embedding"),
        ("position_embedding.weight", 2, "embedding"),
        ("head.weight", 2, "head"),
        ("norm.weight", 1, "vector"),
        ("layers.11.attention_norm.weight", 1, "vector"),
        ("layers.11.attention.q_proj.bias", 1, "vector"),
        ("layers.11.attention.q_proj.weight", 2, "hidden"),
    ],
)
def test_each_parameter_has_a_role(name, dimensions, role):
    assert role_of(name, dimensions) == role
