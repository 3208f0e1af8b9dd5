"""Properties of the decoder apart from its numbers: masks, positions, dtypes, names, roles, meta device, stages."""

import pytest
import torch
from torch import nn

from lightning_llm.config.schema.model import ModelConfig
from lightning_llm.model.decoder import Decoder, mask_padding
from lightning_llm.model.init import initialise
from lightning_llm.model.linear import Linear
from lightning_llm.model.loss import next_token_loss_sum
from lightning_llm.model.norm import LayerNorm, RMSNorm
from tests.model.model_shapes import build, gpt2, llama, tokens_of

both = pytest.mark.parametrize("config", [llama(), gpt2()], ids=["llama", "gpt2"])


@both
def test_a_token_changes_no_logits_before_it(config):
    model, tokens = build(config), tokens_of(config, length=40)
    changed = tokens.clone()
    changed[:, 25] = (changed[:, 25] + 1) % config.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.allclose(before[:, 25:], after[:, 25:])


@both
def test_masked_documents_equal_documents_run_apart(config):
    model = build(config)
    lengths = [1, 70, 14, 65]
    tokens = tokens_of(config, batch=1, length=sum(lengths))
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(tokens, positions, ids)
    apart = torch.cat([model(piece) for piece in tokens.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, apart, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(packed, model(tokens, positions), atol=1e-3)


def test_masked_documents_have_the_gradients_of_documents_run_apart():
    config, lengths = llama(), [30, 66, 4]
    tokens = tokens_of(config, batch=1, length=100)
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed, apart = build(config), build(config)
    next_token_loss_sum(packed(tokens, positions, ids), tokens).backward()
    for piece in tokens.split(lengths, dim=1):
        next_token_loss_sum(apart(piece), piece).backward()
    for mine, other in zip(packed.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, atol=1e-4, rtol=1e-4)


def test_rope_sees_only_differences_of_positions():
    config = llama()
    model, tokens = build(config), tokens_of(config, length=30)
    shifted = torch.arange(30).expand(2, -1) + 57
    torch.testing.assert_close(model(tokens, shifted), model(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", [llama(), llama(tie_embeddings=True), gpt2()], ids=["llama", "tied", "gpt2"])
def test_padding_the_vocabulary_changes_nothing(config):
    unpadded, padded = config.model_copy(update={"vocab_multiple": 1}), config.model_copy(update={"vocab_multiple": 64})
    plain, wide = build(unpadded), build(padded)
    assert plain.embedding.weight.shape[0] == 100
    assert wide.embedding.weight.shape[0] == 128
    tokens, labels = tokens_of(config), tokens_of(config, seed=1)
    losses = [next_token_loss_sum(model(tokens), labels) for model in (plain, wide)]
    torch.testing.assert_close(losses[1], losses[0], atol=0, rtol=1e-6)
    for loss in losses:
        loss.backward()
    for (name, parameter), other in zip(wide.named_parameters(), plain.parameters(), strict=True):
        rows = other.shape[0]
        torch.testing.assert_close(parameter.grad[:rows], other.grad, atol=1e-4, rtol=1e-4, msg=name)
        assert not parameter.grad[rows:].any()
    assert wide(tokens)[..., 100:].eq(torch.finfo(torch.float32).min).all()


def test_mask_padding_of_a_shard():
    logits = torch.zeros(2, 8)
    assert mask_padding(logits.clone(), vocab_size=12, first_id=8).eq(0).tolist() == [[True] * 4 + [False] * 4] * 2
    assert mask_padding(logits.clone(), vocab_size=12, first_id=0).eq(0).all()
    assert not mask_padding(logits.clone(), vocab_size=12, first_id=16).eq(0).any()


@both
def test_bf16_activations_over_fp32_masters(config):
    exact, model = build(config), build(config, dtype=torch.bfloat16)
    seen = set()
    for module in model.modules():
        if isinstance(module, (Linear, RMSNorm, LayerNorm)):
            module.register_forward_hook(lambda m, inputs, output: seen.update({inputs[0].dtype, output.dtype}))
    tokens = tokens_of(config)
    logits = model(tokens)
    assert seen == {torch.bfloat16}
    assert logits.dtype == torch.bfloat16
    real = slice(0, config.vocab_size)
    error = (logits[..., real].float() - exact(tokens)[..., real]).norm() / exact(tokens)[..., real].norm()
    assert error < 0.02
    next_token_loss_sum(logits, tokens).backward()
    assert {p.dtype for p in model.parameters()} == {p.grad.dtype for p in model.parameters()} == {torch.float32}


@both
def test_roles_cover_every_module_that_holds_parameters(config):
    model = Decoder(config)
    holders = {name for name, module in model.named_modules() if list(module.parameters(recurse=False))}
    roles = model.roles()
    assert set(roles) == holders
    for name, role in roles.items():
        module = model.get_submodule(name)
        if name == "head" or name == "embedding":
            assert role == "vocabulary"
        elif isinstance(module, Linear):
            assert role == ("row" if name.endswith(("o_proj", "down_proj")) else "column")
        else:
            assert role == "replicate"
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert linears
    assert all(type(module) is Linear for module in linears)


@pytest.mark.parametrize("config", [llama(), llama(tie_embeddings=True), gpt2()], ids=["llama", "tied", "gpt2"])
def test_stages_in_a_row_are_the_whole(config):
    whole, first, last = build(config), build(config), build(config)
    del first.layers["1"], first.layers["2"], last.layers["0"]
    first.norm = first.head = last.position_embedding = None
    if not config.tie_embeddings:
        last.embedding = None
    assert list(last.blocks) == ["layers.1", "layers.2"]
    assert set(first.state_dict()) | set(last.state_dict()) == set(whole.state_dict())
    assert set(first.roles()) | set(last.roles()) == set(whole.roles())
    assert set(first.roles()) & set(last.roles()) == ({"embedding"} if config.tie_embeddings else set())
    tokens = tokens_of(config)
    assert torch.equal(last(first(tokens)), whole(tokens))


def test_a_stage_names_its_missing_modules():
    config = llama(num_layers=1)
    model, tokens = build(config), tokens_of(config)
    model.head = None
    model.embedding, embedding = None, model.embedding
    with pytest.raises(ValueError, match="pass hidden states"):
        model(tokens)
    with pytest.raises(ValueError, match="neither a head nor the embedding"):
        model(embedding(tokens))


@both
def test_built_on_meta_then_materialised_is_the_same_model(config):
    with torch.device("meta"):
        model = Decoder(config)
    assert not list(model.buffers())
    model.to_empty(device="cpu")
    initialise(model, seed=0)
    tokens = tokens_of(config)
    assert torch.equal(model(tokens), build(config)(tokens))


def test_too_long_a_sequence_is_refused():
    config = llama()
    with pytest.raises(ValueError, match=r"161 tokens exceed model\.max_sequence_length=160"):
        build(config)(tokens_of(config, length=161))


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "documents"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_blocks_compile_whole_and_agree(backend, masked):
    config = llama(num_layers=1)
    eager, compiled = build(config, dtype=torch.bfloat16), build(config, dtype=torch.bfloat16)
    for block in compiled.blocks.values():
        block.compile(fullgraph=True, backend=backend)
    tokens = tokens_of(config)
    ids = torch.arange(150).div(50, rounding_mode="floor").expand(2, -1) if masked else None
    for model in (eager, compiled):
        next_token_loss_sum(model(tokens, None, ids), tokens).div(tokens.numel()).backward()
    for (name, mine), other in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        assert (mine.grad - other.grad).norm() / other.grad.norm() < 2e-2, name


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_has_the_embeddings_first_and_norm_and_head_last(tied):
    sizes = {"num_layers": 3, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 2, "ffn_hidden_size": 16}
    config = ModelConfig(
        name="t", vocab_size=32, max_sequence_length=8, position="learned", tie_embeddings=tied, **sizes
    )
    whole = Decoder(config)
    parts = [whole.stage(layers, layers == [0], layers == [2]) for layers in ([0], [1], [2])]
    assert [list(part.layers) for part in parts] == [["0"], ["1"], ["2"]]
    assert [part.embedding is whole.embedding for part in parts] == [True, False, tied]
    assert [part.position_embedding is whole.position_embedding for part in parts] == [True, False, False]
    assert [part.norm is whole.norm for part in parts] == [False, False, True]
    assert [part.head is not None for part in parts] == [False, False, not tied]
