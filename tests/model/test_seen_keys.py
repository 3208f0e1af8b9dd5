"""Keys that queries see: by pairs against the definition, by blocks against torch's search through all pairs. 4 s."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as flex

from lightning_llm.__main__ import main
from lightning_llm.config.compose import compose_config
from lightning_llm.model.attention import attention
from lightning_llm.model.attention.attention import dot_product_attention
from lightning_llm.model.attention.kernel_choice import SeenKeys, attention_by, document_mask
from lightning_llm.model.decoder import Decoder
from lightning_llm.parallel.cp import keys_of_all_ranks, positions_of
from tests.run_metrics import read_metrics


@st.composite
def sequences(draw):
    """Return (ids [B, T] of documents or None, window, ranks, rank): of a length that `ranks` share."""
    ranks = draw(st.sampled_from([1, 1, 2, 4]))
    length = 2 * ranks * draw(st.integers(1, 90))
    ids = None
    if draw(st.booleans()):
        begins = torch.rand(2, length, generator=torch.Generator().manual_seed(draw(st.integers(0, 9)))) < 0.03
        ids = begins.cumsum(1)
    window = draw(st.none() | st.integers(1, length + 3))
    return ids, window, ranks, draw(st.integers(0, ranks - 1)), length


def seen_of(ids, window, ranks, rank, length) -> SeenKeys:
    positions = positions_of(rank, ranks, length)
    return keys_of_all_ranks(positions, ids, window, ranks)


def by_definition(ids, window, seen: SeenKeys):
    """Pair by pair: the key is not behind the query, of its document, and in its window."""
    query, key = seen.queries[:, None], seen.keys[None, :]
    sees = (key <= query)[None]
    if window is not None:
        sees = sees & (query - key < window)
    if ids is not None:
        sees = sees & (ids[:, seen.queries, None] == ids[:, None, seen.keys])
    return sees[:, None]


def listed(mask, which: str) -> set[tuple[int, int, int]]:
    """Return (sequence, block of queries, block of keys) of a block mask."""
    counts, blocks = getattr(mask, f"{which}_num_blocks")[:, 0], getattr(mask, f"{which}_indices")[:, 0]
    rows = [(b, m) for b in range(len(counts)) for m in range(counts.shape[1])]
    return {(b, m, int(n)) for b, m in rows for n in blocks[b, m, : counts[b, m]]}


@settings(max_examples=60)
@given(sequences())
def test_pairs_and_blocks_are_those_of_the_definition(case):
    """Over ranks a block of keys may lie across two chunks; it may be looked at in part, where nobody sees it whole."""
    ids, window, ranks, *_ = case
    seen = seen_of(*case)
    sees = by_definition(ids, window, seen)
    assert torch.equal(seen.dense(), sees)
    found = seen.blocks()
    wanted = create_block_mask(
        lambda b, h, q, k: sees[b, 0, q, k], len(sees), None, len(seen.queries), len(seen.keys), device="cpu"
    )
    whole, its_whole = listed(found, "full_kv"), listed(wanted, "full_kv")
    every, its_every = whole | listed(found, "kv"), its_whole | listed(wanted, "kv")
    assert (whole, every) == (its_whole, its_every) or (ranks > 1 and whole <= its_whole and every >= its_every)
    rows, keys = (torch.arange(len(each)) for each in (seen.queries, seen.keys))
    for sequence in range(len(sees)):
        told = found.mask_mod(torch.tensor(sequence), torch.tensor(0), rows[:, None], keys[None])
        assert torch.equal(told, sees[sequence, 0])


@pytest.mark.parametrize(("heads", "window"), [(2, None), (4, 40)])
def test_attention_by_blocks_is_that_by_pairs(heads, window, monkeypatch):
    """Forward and backward. On a CPU torch refuses the backward pass of its unfused FlexAttention, which it has."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    generator = torch.Generator().manual_seed(0)
    ids = (torch.rand(2, 300, generator=generator) < 0.02).cumsum(1)
    q, k, v = (torch.randn(2, 300, each, 16, generator=generator, dtype=torch.float64) for each in (4, heads, heads))
    results = []
    for mask in (document_mask(ids, window), seen_of(ids, window, 1, 0, 300).blocks()):
        inputs = [each.clone().requires_grad_() for each in (q, k, v)]
        mixed = dot_product_attention(*inputs, mask)
        results.append([mixed, *torch.autograd.grad(mixed.square().sum(), inputs)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_compiled_block_takes_masks_of_other_documents_in_one_graph(monkeypatch):
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    model = Decoder(compose_config(["model=llama_tiny", "model.num_layers=2"]).model)
    graphs = CompileCounterWithBackend("aot_eager")
    for block in model.layers.values():
        block.compile(backend=graphs, fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    with attention_by("auto", by_blocks=True):
        for _ in range(3):
            ids = (torch.rand(2, 200, generator=generator) < 0.02).cumsum(1)
            tokens = torch.randint(0, 300, (2, 200), generator=generator)
            model(tokens, None, ids).float().square().mean().backward()
            assert graphs.frame_count == 1


@pytest.mark.parametrize(
    "words",
    [
        ("parallel.activation_checkpoint=full", "model.num_kv_heads=1"),
        pytest.param(("parallel.activation_checkpoint=selective",), marks=pytest.mark.full),
    ],
)
def test_a_run_by_blocks_is_the_run_by_pairs(words, small_run, tmp_path, monkeypatch):
    """As on CUDA, but for the kernel: blocks of three kinds, each with its own mask, through recomputation."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    layers = ("model.blocks={local: {mixer: {kind: attention, window: 20}}}",)
    layers += ("model.layers=[local,attention,soft_capped_attention]",)
    common = [*words, *layers, "model.num_layers=3", "data.document_mask=true", "trainer.validate_every_steps=null"]
    common += ["trainer.max_steps=3", "checkpoint.every_steps=null"]
    called = []
    for by_blocks in (False, True):
        monkeypatch.setattr("lightning_llm.run.fit.attention_of", lambda *_, by=by_blocks: attention_by("auto", by))
        monkeypatch.setattr(attention, "flex_attention", lambda *a, **k: called.append(1) or flex(*a, **k))
        assert main(["train", *small_run(tmp_path / str(by_blocks), *common)]) == 0
        assert bool(called) == by_blocks
    pairs, blocks = (read_metrics(tmp_path / each / "run") for each in ("False", "True"))
    for name in ("loss", "grad_norm"):
        ours, theirs = ([each[name] for each in found if name in each] for found in (blocks, pairs))
        assert len(ours) == 3
        assert ours == pytest.approx(theirs, rel=2e-5)
