"""Latent attention computes what transformers' DeepseekV3Attention computes; its cache holds latents alone."""

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from lightning_llm.config.schema.model import ModelConfig, RopeScaling
from lightning_llm.model.attention.attention import torch_attention
from lightning_llm.model.attention.latent import LatentAttention
from lightning_llm.model.attention.latent_kind import LatentAttention as Kind
from lightning_llm.model.decoder import Decoder
from lightning_llm.model.rope import rope_tables, score_factor
from lightning_llm.model.structure import shape_problems
from tests.model.model_shapes import build, llama, tokens_of

SIZES = {"q_rank": 24, "kv_rank": 20, "nope_dim": 12, "rope_dim": 8, "value_dim": 10}
YARN = {"kind": "yarn", "factor": 4.0, "original_sequence_length": 40, "mscale": 0.7, "mscale_all_dim": 1.2}
CASES = {
    "deepseek": ({}, None),
    "without a latent of queries": ({"q_rank": None}, None),
    "halves": ({"interleaved": False}, None),
    "yarn": ({}, YARN),
    "yarn without mscale": ({}, {key: value for key, value in YARN.items() if "mscale" not in key}),
    "values as wide as keys": ({"value_dim": 20}, None),
}


def with_latents(scaling: dict | None = None, sizes: dict | None = None, **changes) -> ModelConfig:
    blocks = {"mla": {"mixer": {"kind": "mla", **SIZES, **(sizes or {})}}}
    scaling = None if scaling is None else RopeScaling(**scaling)
    return llama(blocks=blocks, layers=["mla"], rope_scaling=scaling, norm_eps=1e-6, **changes)


def theirs_of(config: ModelConfig, kind: Kind) -> tuple[DeepseekV3Attention, DeepseekV3RotaryEmbedding]:
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is not None:
        given = {key: value for key in ("factor", "mscale", "mscale_all_dim") if (value := getattr(scaling, key))}
        rope |= {"rope_type": "yarn", "original_max_position_embeddings": scaling.original_sequence_length, **given}
    entries = DeepseekV3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        q_lora_rank=kind.q_rank,
        kv_lora_rank=kind.kv_rank,
        qk_nope_head_dim=kind.nope_dim,
        qk_rope_head_dim=kind.rope_dim,
        v_head_dim=kind.value_dim,
        rope_interleave=kind.interleaved,
        max_position_embeddings=config.max_sequence_length,
        rope_parameters=rope,
        attn_implementation="eager",
    )
    return DeepseekV3Attention(entries, 0), DeepseekV3RotaryEmbedding(entries)


def their_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    renamed = {"q_a_norm": "q_a_layernorm", "kv_a_norm": "kv_a_layernorm", "kv_a_proj": "kv_a_proj_with_mqa"}
    return {".".join([renamed.get(name.split(".")[0], name.split(".")[0]), "weight"]): t for name, t in state.items()}


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.ndim == 1))
    return module


@pytest.mark.parametrize(("sizes", "scaling"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("kernel", ["short", "torch"])
def test_outputs_and_gradients_are_those_of_transformers(sizes, scaling, kernel):
    config = with_latents(scaling, sizes)
    kind = config.block_at(0).mixer
    ours = shaken(LatentAttention(kind, config))
    theirs, rotary = theirs_of(config, kind)
    theirs.load_state_dict(their_names(ours.state_dict()))
    if kernel == "torch":
        ours.attend = torch_attention
    torch.manual_seed(2)
    inputs = [torch.randn(2, 50, config.hidden_size).requires_grad_() for _ in range(2)]
    inputs[1].data.copy_(inputs[0])
    positions = torch.arange(50)
    found = ours(inputs[0], rope_tables(config, positions, kind.rope_dim), None)
    mask = torch.full((50, 50), float("-inf")).triu(1)[None, None]
    expected, _ = theirs(inputs[1], rotary(inputs[1], positions[None]), mask)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    gradient = torch.randn(found.shape)
    found.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-4, atol=1e-5)
    gradients = their_names({name: parameter.grad for name, parameter in ours.named_parameters()})
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(
            gradients[name], parameter.grad, rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_scores_of_deepseek_v3_are_multiplied_by_the_square_of_its_magnitude():
    """0.1 ln 40 + 1 = 1.36889, as in DeepSeek-V3's inference/model.py, and cosine and sine stay as they are."""
    scaling = RopeScaling(kind="yarn", factor=40.0, original_sequence_length=4096, mscale=1.0, mscale_all_dim=1.0)
    assert score_factor(scaling) == pytest.approx(1.3688879454**2)
    assert with_latents().rope_scaling is None
    config = llama(rope_scaling=scaling)
    cosine, _ = rope_tables(config, torch.zeros(1), 8)
    assert cosine.eq(1).all()


def test_generation_keeps_the_latent_and_the_rotated_key_of_each_token():
    config = with_latents(YARN)
    model, tokens = build(config).eval(), tokens_of(config, length=70)
    with torch.no_grad():
        cache = model.new_cache(2, 96)
        logits = torch.cat([model.step(part, cache) for part in tokens.split(7, dim=1)], dim=1)
        torch.testing.assert_close(logits, model(tokens), rtol=1e-5, atol=1e-5)
    kept = cache.mixers["layers.0"]._slots
    kind = config.block_at(0).mixer
    assert sum(slots[0, 0].numel() for slots in kept) == kind.kv_rank + kind.rope_dim == kind.cached_elements(config)


@pytest.mark.parametrize(
    ("sizes", "changes", "text"),
    [
        ({"rope_dim": 7}, {}, "rope_dim=7: must be even: positions turn pairs of elements. Use 8."),
        ({"value_dim": 21}, {}, "value_dim=21: must be at most nope_dim + rope_dim = 20"),
        ({}, {"position": "learned"}, "model.position: is learned, and kind=mla rotates"),
    ],
)
def test_sizes_that_make_no_attention_are_named(sizes, changes, text):
    (problem,) = {str(each) for each in shape_problems(with_latents(None, sizes, **changes))}
    assert text in problem


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mscale": 1.0}, "mscale needs mscale_all_dim"),
        ({"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0}, "no attention_factor"),
        ({"kind": "linear", "original_sequence_length": None, "mscale_all_dim": 1.0}, "takes no mscale_all_dim"),
    ],
)
def test_magnitudes_that_contradict_are_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        RopeScaling(**({"kind": "yarn", "factor": 4.0, "original_sequence_length": 40} | changes))


def test_blocks_of_both_kinds_rotate_by_tables_of_their_own():
    """A decoder of attention (head_dim 16) and latent attention (rope_dim 8): the second block alone sees positions."""
    blocks = {"mla": {"mixer": {"kind": "mla", **SIZES}}}
    model: Decoder = build(llama(num_layers=2, blocks=blocks, layers=["attention", "mla"]))
    tables = model._rope_by_width(torch.arange(5))
    assert {width: table[0].shape[-1] for width, table in tables.items()} == {16: 8, 8: 4}
    assert model(tokens_of(model.config, length=30)).isfinite().all()
