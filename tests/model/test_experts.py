"""A mixture of experts computes what transformers' classes compute, and its losses are those of their papers."""

import re

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from lightning_llm.config.compose import compose_config
from lightning_llm.linalg import gemm
from lightning_llm.model.experts.dispatch import place
from lightning_llm.model.experts.kinds import MoE, RouterConfig
from lightning_llm.model.experts.moe import MixtureOfExperts
from lightning_llm.model.experts.router import choose, within_capacity
from lightning_llm.model.feed_forward import DenseFeedForward
from lightning_llm.model.flops import count_parameters, flops_per_token
from lightning_llm.model.interop.families import architecture
from lightning_llm.model.kinds import SwiGLU
from lightning_llm.model.structure import shape_problems
from tests.model.model_shapes import build, llama, tokens_of

D, F, E, K = 32, 24, 8, 3
SIZES = {"hidden_size": D, "num_experts_per_tok": K, "moe_intermediate_size": F, "experts_implementation": "eager"}
DEEPSEEK = {"score": "sigmoid", "groups": 4, "groups_chosen": 2, "scale": 2.5, "bias_update_rate": 0.001}
THEIRS = {
    "mixtral": (
        MixtralSparseMoeBlock,
        MixtralConfig(
            hidden_size=D,
            intermediate_size=F,
            num_local_experts=E,
            num_experts_per_tok=K,
            experts_implementation="eager",
        ),
        {},
    ),
    "qwen3_moe": (
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig(num_experts=E, norm_topk_prob=False, **SIZES),
        {"router": {"normalise": False}},
    ),
    "deepseek_v3": (
        DeepseekV3MoE,
        DeepseekV3Config(n_routed_experts=E, n_group=4, topk_group=2, n_shared_experts=2, **SIZES),
        {"shared_experts": 2, "router": DEEPSEEK},
    ),
}


def moe(**keys) -> MoE:
    return MoE.model_validate({"experts": E, "per_token": K, "ffn_hidden_size": F, **keys})


def module_of(kind: MoE, dtype: torch.dtype = torch.float32, seed: int = 0) -> MixtureOfExperts:
    module = MixtureOfExperts(kind, llama(hidden_size=D, head_dim=8)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module


def their_weights(ours: MixtureOfExperts, of=lambda parameter: parameter) -> dict[str, torch.Tensor]:
    """Return `ours`, or what `of` returns for its parameters, by transformers' names."""
    experts = ours.experts
    gate, up, down = (of(each.weight) for each in (experts.gate_proj, experts.up_proj, experts.down_proj))
    found = {"gate.weight": of(ours.router.weight), "experts.down_proj": down.view(E, D, F)}
    found["experts.gate_up_proj"] = torch.cat([gate.view(E, F, D), up.view(E, F, D)], dim=1)
    if ours.shared is not None:
        found |= {f"shared_experts.{name}": of(each) for name, each in ours.shared.named_parameters()}
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", THEIRS)
def test_outputs_and_gradients_are_those_of_transformers(name, dtype):
    """Routing of theirs is in fp32 even for fp64 inputs, so fp64 holds to its precision."""
    build_theirs, config, keys = THEIRS[name]
    ours, theirs = module_of(moe(**keys), dtype), build_theirs(config).to(dtype)
    state = their_weights(ours)
    if ours.router.correction is not None:
        state["gate.e_score_correction_bias"] = ours.router.correction
    theirs.load_state_dict(state)
    torch.manual_seed(1)
    inputs = [torch.randn(2, 37, D, dtype=dtype).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0])
    gradient = torch.randn(2, 37, D, dtype=dtype)
    results = [ours(inputs[0]), theirs(inputs[1])]
    for each in results:
        each.backward(gradient)
    assert results[0].std() > 0.1
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-5, atol=1e-5)
    expected = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    found = their_weights(ours, lambda parameter: parameter.grad)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key} {text}")


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_are_those_of_the_formulas(score):
    """Numpy's version of Megatron-LM's: alpha E / (k M^2) sum_e c_e sum_t s_te, and beta mean_t logsumexp(l_t)^2."""
    ours = module_of(moe(balance_loss=0.1, z_loss=0.3, router={"score": score}))
    x = torch.randn(2, 21, D)
    ours(x)
    logits = (x.flatten(0, 1) @ ours.router.weight.t()).detach().numpy().astype(np.float64)
    scores = 1 / (1 + np.exp(-logits))
    if score == "softmax":
        scores = np.exp(logits)
    scores /= scores.sum(1, keepdims=True)
    counts = np.bincount(np.argsort(-logits, axis=1)[:, :K].ravel(), minlength=E)
    balance = 0.1 * E * (counts / (K * 42) * scores.mean(0)).sum()
    assert ours.auxiliary_losses["balance"].item() == pytest.approx(balance, rel=1e-5)
    z = 0.3 * (np.log(np.exp(logits).sum(1)) ** 2).mean()
    assert ours.auxiliary_losses["router_z"].item() == pytest.approx(z, rel=1e-5)
    if score == "softmax":
        theirs = load_balancing_loss_func((torch.tensor(logits),), num_experts=E, top_k=K)
        assert ours.auxiliary_losses["balance"].item() == pytest.approx(0.1 / K * theirs.item(), rel=1e-5)


def test_of_equal_scores_the_first_experts_are_chosen():
    router = RouterConfig()
    assert choose(torch.tensor([[0.5, 0.5, 0.5, 0.1]]), 2, router).tolist() == [[0, 1]]
    assert choose(torch.zeros(3, 300), 4, router).tolist() == [[0, 1, 2, 3]] * 3
    grouped = RouterConfig(score="sigmoid", groups=4, groups_chosen=2)
    assert choose(torch.ones(1, 8), 3, grouped).tolist() == [[0, 1, 2]]


def test_the_bias_moves_the_choice_and_not_the_weights():
    keys = {"score": "sigmoid", "bias_update_rate": 0.1, "normalise": False}
    ours = module_of(moe(router=keys))
    ours.router.correction.data = torch.tensor([9.0, 8, 7, 0, 0, 0, 0, 0])
    x = torch.randn(1, 5, D)
    choices, scores = ours._choices(ours.router(x[0]))
    assert choices.chosen.tolist() == [[0, 1, 2]] * 5
    assert torch.equal(choices.weights, scores[:, :3])


@pytest.mark.parametrize("drop", ["weight", "position"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_capacity_drops_what_brute_force_drops(drop, factor):
    torch.manual_seed(3)
    tokens, experts, k = 6, 3, 2
    kind = MoE(experts=experts, per_token=k, capacity_factor=factor, drop=drop)
    chosen = torch.stack([torch.randperm(experts)[:k].sort().values for _ in range(tokens)])
    weights = torch.rand(tokens, k).mul(4).round().div(4)  # with ties
    capacity = -int(-(k * tokens / experts * factor) // 1)
    expected = torch.zeros(tokens, k, dtype=torch.bool)
    for expert in range(experts):
        takers = [(t, j) for t in range(tokens) for j in range(k) if chosen[t, j] == expert]
        if drop == "weight":
            takers.sort(key=lambda at: -weights[at].item())
        for at in takers[:capacity]:
            expected[at] = True
    assert torch.equal(within_capacity(chosen, weights, kind), expected)


def test_a_dropped_choice_adds_nothing_and_gets_no_gradient():
    ours = module_of(moe(capacity_factor=0.4, balance_loss=0.0, z_loss=0.0))
    x = torch.randn(1, 30, D, requires_grad=True)
    choices, _ = ours._choices(ours.router(x[0]))
    assert 0 < (~choices.kept).sum() < 90
    whole = module_of(moe(balance_loss=0.0, z_loss=0.0))
    mixed = whole.experts(x, choices._replace(kept=None, weights=choices.weights * choices.kept))[0]
    gradients = [torch.autograd.grad(y.sum(), [x, *whole.experts.parameters()]) for y in (mixed,)]
    y = ours(x)[0]
    torch.testing.assert_close(y, mixed)
    for one, other in zip(torch.autograd.grad(y.sum(), [x, *ours.experts.parameters()]), gradients[0], strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    ours.count()
    assert ours.step_dropped == (~choices.kept).sum()
    assert ours.step_loads.sum() == 90


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_expert_is_the_dense_network_bit_for_bit(dtype):
    model = llama(hidden_size=D, ffn_hidden_size=F)
    ours = module_of(moe(experts=1, per_token=1, balance_loss=0.0, z_loss=0.0))
    dense = DenseFeedForward(SwiGLU(), model)
    dense.load_state_dict({key.removeprefix("experts."): v for key, v in ours.state_dict().items() if "experts" in key})
    x = torch.randn(2, 40, D, dtype=dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    gradient, results = torch.randn_like(x), []
    for module, each in zip((ours, dense), inputs, strict=True):
        y = module(each)
        y.backward(gradient)
        results.append([y, each.grad, *(module.get_parameter(name).grad for name in names_of(module))])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def names_of(module: torch.nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters() if "proj" in name]


def test_rows_are_sorted_by_expert_and_then_by_token():
    chosen = torch.tensor([[0, 2], [1, 2], [0, 1]])
    found = place(chosen, None, 4)
    assert found.groups.counts == [2, 2, 2, 0]
    assert found.rows.tolist() == [[0, 4], [2, 5], [1, 3]]
    local = place(chosen, torch.tensor([[True, True], [True, False], [True, True]]), 2, first=1, of=4, multiple=4)
    assert local.groups.counts == [4, 4]
    assert local.rows.tolist() == [[8, 4], [0, 8], [8, 1]]


MODELS = {
    "softmax": {},
    "deepseek": {"shared_experts": 1, "router": DEEPSEEK | {"bias_update_rate": 0.01}},
}


@pytest.mark.parametrize("keys", MODELS.values(), ids=MODELS)
def test_generated_logits_do_not_depend_on_how_tokens_are_split(keys):
    blocks = {"moe": {"feed_forward": {"kind": "moe", "experts": 8, "per_token": 3, "ffn_hidden_size": 24, **keys}}}
    config = llama(blocks=blocks, layers=["attention", "moe"])
    model = build(config).eval().requires_grad_(False)
    tokens = tokens_of(config, length=40)
    caches = [model.new_cache(2, 40) for _ in range(3)]
    at_once = model.step(tokens, caches[0])
    for sizes, cache in zip(([1] * 40, [7, 20, 13]), caches[1:], strict=True):
        parts = [model.step(part, cache) for part in tokens.split(sizes, dim=1)]
        assert torch.equal(torch.cat(parts, dim=1), at_once)
    torch.testing.assert_close(at_once, model(tokens), atol=1e-4, rtol=1e-4)


def test_parameters_and_flops_count_the_chosen_experts():
    blocks = {"moe": {"feed_forward": {"kind": "moe", "experts": 8, "per_token": 2, "ffn_hidden_size": 48}}}
    sparse, dense = llama(blocks=blocks, layers=["moe"]), llama()
    router, expert = 8 * 64, 3 * 48 * 64
    ours, theirs = count_parameters(sparse), count_parameters(dense)
    assert ours.total == theirs.total + 3 * (router + 6 * expert)
    assert ours.active == theirs.total + 3 * router
    assert theirs.active == theirs.total
    assert flops_per_token(sparse, 64) == flops_per_token(dense, 64) + 6 * 3 * router


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"per_token": 9}, "per_token: is 9, and there are 8 experts. Use at most 8."),
        ({"router": {"groups": 3, "groups_chosen": 1}}, "does not divide experts=8. Use one of 1, 2, 4, null."),
        ({"router": {"groups": 4, "groups_chosen": 1}}, "1 groups of 2 experts have 2, and per_token=3"),
        ({"router": {"groups": 4, "groups_chosen": 5}}, "groups_chosen: is 5, and there are 4 groups. Use at most 4."),
        ({"router": {"groups": 8, "groups_chosen": 3}}, "is 8, which leaves one expert per group"),
        ({"router": {"groups": 4}}, "needs groups_chosen"),
    ],
)
def test_numbers_that_do_not_fit_are_rejected(keys, text):
    block = {"moe": {"feed_forward": {"kind": "moe", "experts": 8, "per_token": 3, **keys}}}
    found = [f"{each.key}: {each.text}" for each in shape_problems(llama(blocks=block, layers=["moe"]))]
    assert any(re.search(re.escape(text), each) for each in found), found


def test_experts_without_tokens_get_zero_gradients():
    ours = module_of(moe(per_token=1))
    ours.router.weight.data[:] = 0.0  # equal logits: all tokens choose expert 0
    ours(torch.randn(1, 7, D)).sum().backward()
    gradient = ours.experts.up_proj.weight.grad.view(E, F, D)
    assert gradient[0].ne(0).any()
    assert gradient[1:].eq(0).all()


def test_an_expert_without_tokens_has_a_result_of_no_rows_in_fp16():
    x = torch.randn(4, 24, dtype=torch.float16, requires_grad=True)
    made = gemm.linear(x[4:], torch.randn(16, 24, dtype=torch.float16), None)
    assert made.shape == (0, 16)


@pytest.mark.parametrize("name", ["mixtral_8x7b", "qwen3_30b_a3b"])
def test_presets_have_the_published_balance_loss(name):
    """The coefficient that the weights' config.json has: 0.02 and 0.001 (transformers' form, see `coefficient`)."""
    config = compose_config([f"model={name}"]).model
    published = {"mixtral_8x7b": 0.02, "qwen3_30b_a3b": 0.001}[name]
    assert architecture(config).entries(config)["router_aux_loss_coef"] == published
