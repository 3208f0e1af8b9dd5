"""Each registered kind's plan of a block against the module that it builds. 20 seconds."""

import math
import re
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_llm.config.schema.model import FEED_FORWARDS, MIXERS, NORMS, ModelConfig
from lightning_llm.linalg.grouped import GroupedLinear
from lightning_llm.model.attention import attention
from lightning_llm.model.attention.kernel_choice import document_mask
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.flops import count_parameters
from lightning_llm.model.init import distribution_of
from lightning_llm.model.rope import rope_tables
from lightning_llm.model.spec import ForwardPass
from lightning_llm.model.structure import block_linears, block_parameters, block_parts, linear_names, mixer_of
from tests.model.model_shapes import build, llama

LENGTH = 24
KEYS = {"attention": [{"window": 8}], "soft_capped_attention": [{"window": 8, "query_pre_attention_scalar": 24}]}
ROUTER = {"score": "sigmoid", "groups": 4, "groups_chosen": 2, "scale": 2.5, "bias_update_rate": 0.001}
KEYS["moe"] = [
    {"ffn_hidden_size": 32, "shared_experts": 2, "router": ROUTER},
    {"experts": 4, "per_token": 1, "z_loss": 0.0, "balance_loss": 0.0, "router": {"normalise": False}},
    {"experts": 4, "per_token": 1, "router": {"normalise": False, "hidden_size": 24}},
]
KEYS["gla"] = [{"num_heads": 2, "expand_k": 1.0, "expand_v": 2.0, "gate_low_rank_dim": 8}]
KEYS["mla"] = [
    {"q_rank": None, "kv_rank": 24, "nope_dim": 16, "rope_dim": 8, "value_dim": 24, "window": 8},
    {"q_rank": 24, "kv_rank": 20, "nope_dim": 12, "rope_dim": 8, "value_dim": 10, "interleaved": False},
]
KEYS["cca"] = [{"window": 8, "depthwise_tokens": 1, "grouped_tokens": 3, "rope_dim": 16}]
"""Settings other than a kind's defaults that are tested with a block."""


def blocks_of(sort: str, registry) -> list:
    """Return params of (name, changes of a model): every kind of a registry by its defaults, and with `KEYS`."""
    found = []
    for kind in registry:
        for number, keys in enumerate([{}, *KEYS.get(kind, [])]):
            block = {"x": {sort: {"kind": kind, **keys}}}
            found.append(pytest.param({"blocks": block, "layers": ["x"]}, id=f"{kind}{number or ''}"))
    return found


KINDS = [
    *blocks_of("mixer", MIXERS),
    *blocks_of("feed_forward", FEED_FORWARDS),
    *(pytest.param({"norm": kind}, id=kind) for kind in NORMS),
    pytest.param(
        {"norm": "layernorm", "bias": True, "blocks": {"x": {"post_norms": True}}, "layers": ["x"]}, id="bias"
    ),
    pytest.param(
        {"blocks": {"x": {"residual_scaling": True, "input_scaling": True, "post_norms": True}}, "layers": ["x"]},
        id="scaled",
    ),
    pytest.param({"layers": ["attention", "qk_norm_attention", "gla"]}, id="pattern"),
]
every_kind = pytest.mark.parametrize("changes", KINDS)


def on_meta(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config)


@every_kind
def test_parameters_linears_and_roles_are_those_of_the_module(changes):
    config = llama(**changes)
    model = on_meta(config)
    kinds = nn.Linear | GroupedLinear
    assert linear_names(config) == [name for name, module in model.named_modules() if isinstance(module, kinds)]
    for index in range(config.num_layers):
        block = model.layers[str(index)]
        assert list(dict(block.named_children())) == list(block_parts(config, index))
        planned = {each.name: tuple(each.shape) for each in block_parameters(config, index)}
        assert planned == {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
        roles = {
            each.name.rpartition(".")[0]: each.role
            for each in block_parameters(config, index)
            if "bias" not in each.name
        }
        assert roles == {
            name.removeprefix(f"layers.{index}."): role for name, role in model.roles().items() if f".{index}." in name
        }
        for linear in block_linears(config, index):
            assert (getattr(block.get_submodule(linear.name), "bias", None) is not None) == linear.bias
    assert count_parameters(config, padded=True).total == sum(parameter.numel() for parameter in model.parameters())


@every_kind
@pytest.mark.parametrize("scheme", ["llama", "gpt2"])
def test_parameters_are_drawn_as_the_description_says(changes, scheme):
    config = llama(**changes, init=scheme, hidden_size=128, head_dim=32)
    for name, parameter in build(config).named_parameters():
        said = distribution_of(config, name)
        if said.std == 0.0:
            assert parameter.eq(said.mean).all(), name
            continue
        kept = 0.98658 if said.cut else 1.0
        assert parameter.mean().abs() < 5 * said.std / math.sqrt(parameter.numel()), name
        assert parameter.std().item() == pytest.approx(said.std * kept, rel=5 / math.sqrt(2 * parameter.numel())), name


def block_and_inputs(config: ModelConfig, length: int, dtype: torch.dtype = torch.float32):
    model = build(config, dtype=dtype)
    x = torch.randn(2, length, config.hidden_size, dtype=dtype, requires_grad=True)
    if mixer_of(config, 0).recurrent:
        return model.layers["0"], (x, None, None)
    rope = rope_tables(config, torch.arange(length), mixer_of(config, 0).rope_width(config))
    seen = model.seen_keys(torch.arange(length), None, mixer_of(config, 0).window_tokens(config))
    mask = None if seen is None else seen.dense()
    return model.layers["0"], (x, rope, mask)


def output_of(block: nn.Module, *inputs: object) -> torch.Tensor:
    """Return the block's hidden states, without a state of its router."""
    found = block(*inputs)
    return found[0] if block.gives_state else found


def by_steps(mixer: nn.Module, x: torch.Tensor, rope: None, document_ids: None) -> torch.Tensor:
    cache = mixer.new_cache(*x.shape[:2])
    return torch.cat([mixer.step(token, rope, cache) for token in x.split(1, dim=1)], dim=1)


@every_kind
def test_flops_are_those_that_torch_counts(changes, monkeypatch):
    """With windows the formula counts visible keys; the plain products counted here compute all.

    A recurrent mixer's are those of its steps, token by token.
    """
    monkeypatch.setattr(attention, "is_faster_here", lambda q: False)  # an operator that the counter does not know
    monkeypatch.setattr(attention, "filled_up", lambda values, width: values)  # as zeros, which are no model's FLOPs
    config = llama(**changes)
    mixer = mixer_of(config, 0)
    window = mixer.window_tokens(config)
    length = window or LENGTH
    block, inputs = block_and_inputs(config, length)
    if mixer.recurrent:
        monkeypatch.setattr(block.attention, "forward", partial(by_steps, block.attention))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        output_of(block, *inputs).sum().backward()
    linears = sum(linear.active_elements for linear in block_linears(config, 0))
    mixing = [sum(part.flops_per_token(config, t) for part in block_parts(config, 0).values()) for t in (length, 99)]
    assert counter.get_total_flops() == 2 * length * (6 * linears + mixing[0])
    assert (mixing[1] == mixing[0]) == (window is not None or mixer.recurrent)


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("length", "documents"), [(112, False), (112, True), (624, True)])
def test_planned_saved_tensors_are_those_of_autograd(changes, length, documents, dtype):
    """To the byte, part by part. Left out are weights, their casts, rotary tables, and the mask that blocks share."""
    config = llama(**changes, hidden_size=64, head_dim=16, ffn_hidden_size=96, max_sequence_length=length)
    block, (x, rope, mask) = block_and_inputs(config, length, dtype)
    ids = torch.arange(2 * length).view(2, length) // 50 if documents else None
    recurrent, window = mixer_of(config, 0).recurrent, mixer_of(config, 0).window_tokens(config)
    mask = ids if recurrent else document_mask(ids, window) if documents else mask
    known = [*block.parameters(), *(rope or ()), *([] if mask is None else [mask])]
    seen, kept = {each.untyped_storage()._cdata for each in known}, Counter()
    within = [""]
    for name, part in block.named_children():
        part.register_forward_pre_hook(lambda *_, name=name: within.append(name))
        part.register_forward_hook(lambda *_: within.remove(within[-1]))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and (tensor.dim() > 2 or tensor.shape[0] % length == 0):  # no weight cast on use
            kept[within[-1]] += storage.nbytes()
            alive.append(storage)
        seen.add(storage._cdata)
        return tensor

    alive: list[torch.UntypedStorage] = []
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = output_of(block, x, rope, mask)
    assert result.shape == x.shape
    forward = ForwardPass(dtype.itemsize, length, documents)

    def planned(part):
        saved = part.saved_tensors(config, forward)
        return sum(each.elements * each.width * length * (1 if each.per_position else 2) for each in saved)

    assert dict(kept) == {name: planned(part) for name, part in block_parts(config, 0).items()}


def test_a_pattern_is_repeated_over_the_layers():
    blocks = {"local": {"mixer": {"kind": "attention", "window": 8}}}
    config = llama(num_layers=5, layers=["local", "attention", "qk_norm_attention"], blocks=blocks)
    model = build(config)
    kinds = [type(block.attention).__name__ for block in model.layers.values()]
    assert kinds == ["Attention", "Attention", "QKNormAttention", "Attention", "Attention"]
    assert [block.attention_kind.window for block in model.layers.values()] == [8, None, None, 8, None]


def test_a_uniform_pattern_is_the_model_without_one():
    tokens = torch.arange(48).view(2, 24)
    plain, patterned = build(llama()), build(llama(layers=["attention"]))
    assert list(plain.state_dict()) == list(patterned.state_dict())
    assert torch.equal(plain(tokens), patterned(tokens))


def test_a_window_hides_earlier_tokens():
    """Of one block with a window of 8 tokens, the last position sees what changes among the last 8."""
    config = llama(num_layers=1, blocks={"local": {"mixer": {"kind": "attention", "window": 8}}}, layers=["local"])
    model = build(config)
    tokens = torch.arange(24)[None]
    first = model(tokens)[0, -1]
    for position in range(24):
        other = tokens.clone()
        other[0, position] += 30
        assert torch.equal(model(other)[0, -1], first) == (position < 24 - 8), position
    two = torch.stack([tokens[0], tokens[0].flip(0)])
    documents = torch.zeros(2, 24, dtype=torch.int64)
    torch.testing.assert_close(model(two, document_ids=documents), model(two))
    torch.testing.assert_close(model(two)[0, -1], first)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"layers": ["atention"]},
            "'atention' is neither in model.blocks nor a mixer. Did you mean 'attention'?",
        ),
        ({"layers": []}, "at least 1 item"),
        ({"norm": "rmsnor"}, "there is no norm 'rmsnor'. Did you mean 'rmsnorm' or "),
        ({"activation": "swigl"}, "there is no feed-forward network 'swigl'. Did you mean 'swiglu'?"),
    ],
)
def test_unknown_kinds_are_named(changes, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        llama(**changes)
